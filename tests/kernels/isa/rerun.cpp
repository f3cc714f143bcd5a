// Reruns recorded calls of CPU kernels: rerun LIBRARY CALLS RESULTS...
//
// `calls.py` describes the files. For each file of results a thread reruns all calls, with memory of
// its own, all threads at the same time. A call's memory ends where its pages end, and the page
// behind it may not be touched: a kernel that reads or writes beyond a tensor stops this program.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#endif

#ifdef __SANITIZE_THREAD__
// The C library frees memory of a thread that has ended, whose destructors have read it.
extern "C" const char* __tsan_default_suppressions() { return "race:_dl_deallocate_tls"; }
#endif

namespace {

using tvm::ffi::AnyView;

// Memory of one or more tensors, at the end of its pages.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    room_ = (bytes + page - 1) / page * page;
    mapped_ = room_ + page;
    void* pages = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::runtime_error("no memory for a call");
    pages_ = static_cast<uint8_t*>(pages);
    mprotect(pages_ + room_, page, PROT_NONE);
    std::fill(pages_, data(), kUntouched);
    ASAN_POISON_MEMORY_REGION(pages_, room_ - bytes_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(pages_, room_ - bytes_);
    munmap(pages_, mapped_);
  }

  uint8_t* data() const { return pages_ + room_ - bytes_; }
  size_t bytes() const { return bytes_; }
  bool untouched_before() const {
    ASAN_UNPOISON_MEMORY_REGION(pages_, room_ - bytes_);
    return std::all_of(pages_, data(), [](uint8_t byte) { return byte == kUntouched; });
  }

 private:
  static constexpr uint8_t kUntouched = 0xa5;

  size_t bytes_, room_, mapped_;
  uint8_t* pages_;
};

struct Call {
  std::string name;
  std::deque<Buffer> buffers;
  std::deque<std::vector<int64_t>> shapes;  // of tensors, and their strides
  std::deque<DLTensor> tensors;
  std::vector<AnyView> arguments;
};

std::vector<int64_t> read_numbers(std::istream& in, int32_t count) {
  std::vector<int64_t> numbers(static_cast<size_t>(count));
  for (int64_t& number : numbers) in >> number;
  return numbers;
}

void read_tensor(std::istream& in, Call& call) {
  size_t buffer = 0, offset = 0;
  int code = 0, bits = 0;
  DLTensor tensor = {};
  in >> buffer >> offset >> code >> bits >> tensor.ndim;
  tensor.data = call.buffers.at(buffer).data() + offset;
  tensor.device = {kDLCPU, 0};
  tensor.dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  tensor.shape = call.shapes.emplace_back(read_numbers(in, tensor.ndim)).data();
  tensor.strides = call.shapes.emplace_back(read_numbers(in, tensor.ndim)).data();
  call.arguments.emplace_back(&call.tensors.emplace_back(tensor));
}

// Reads the lines of a call up to "end".
void read_call(std::istream& in, Call& call) {
  in >> call.name;
  for (std::string word; in >> word && word != "end";) {
    if (word == "buffer") {
      size_t bytes = 0;
      in >> bytes;
      in.get();  // The line's end.
      in.read(reinterpret_cast<char*>(call.buffers.emplace_back(bytes).data()),
              static_cast<std::streamsize>(bytes));
    } else if (word == "tensor") {
      read_tensor(in, call);
    } else if (word == "none") {
      call.arguments.emplace_back(nullptr);
    } else if (word == "float") {
      double value = 0;
      in >> value;
      call.arguments.emplace_back(value);
    } else {
      int64_t value = 0;
      in >> value;
      word == "bool" ? call.arguments.emplace_back(value != 0) : call.arguments.emplace_back(value);
    }
  }
  if (!in) throw std::runtime_error("the calls end within " + call.name);
}

// "ok", or the error of the kernel.
std::string run(const tvm::ffi::Module& library, Call& call) {
  const auto kernel = library->GetFunction(call.name);
  if (!kernel.has_value()) return "missing: no such kernel in the library";
  std::string outcome = "ok";
  try {
    tvm::ffi::Any result;
    kernel.value().CallPacked(call.arguments.data(), static_cast<int32_t>(call.arguments.size()),
                              &result);
  } catch (const tvm::ffi::Error& error) {
    outcome = error.kind() + ": " + error.message();
  }
  for (const Buffer& buffer : call.buffers) {
    if (!buffer.untouched_before()) outcome = "overrun: wrote before a tensor";
  }
  return outcome;
}

void rerun(const tvm::ffi::Module& library, const char* calls, const char* results) {
  std::ifstream in(calls, std::ios::binary);
  std::ofstream out(results, std::ios::binary);
  if (!in || !out) throw std::runtime_error("cannot open the files");
  std::string word;
  for (int64_t number = 0; in >> word && word == "call"; ++number) {
    Call call;
    read_call(in, call);
    // Last line of a program that is stopped: which call it was.
    std::cerr << "call " << number << ": " << call.name << '\n';
    out << run(library, call) << '\n';
    for (const Buffer& buffer : call.buffers) {
      out.write(reinterpret_cast<const char*>(buffer.data()),
                static_cast<std::streamsize>(buffer.bytes()));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: rerun LIBRARY CALLS RESULTS...\n";
    return 2;
  }
  std::atomic<int> code{0};
  const auto guarded = [&](const auto& work) {
    try {
      work();
    } catch (const std::exception& error) {
      std::cerr << "rerun: error: " << error.what() << '\n';
      code = 1;
    }
  };
  guarded([&] {
    const auto library = tvm::ffi::Module::LoadFromFile(argv[1]);
    std::vector<std::thread> threads;
    for (int i = 3; i < argc; ++i) {
      threads.emplace_back([&, i] { guarded([&] { rerun(library, argv[2], argv[i]); }); });
    }
    for (std::thread& thread : threads) thread.join();
  });
  return code;
}
