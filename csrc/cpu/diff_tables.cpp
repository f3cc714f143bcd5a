// diff_tables: the slots of lru_diff.cpp, and their device pages.
#include "lru_diff.h"
#include "tensors.h"

namespace hisparse {

namespace {

// The rows' device pages [NR, C].
struct DevicePages {
  Rows<const int32_t> data;
  int64_t num_rows, num_slots;

  explicit DevicePages(const TensorView& device_pages)
      : data(rows_of<const int32_t>(device_pages, "device_pages")),
        num_rows(device_pages.size(0)),
        num_slots(device_pages.size(1)) {}

  const int32_t* row(int64_t row) const {
    if (row < 0 || row >= num_rows) {
      TVM_FFI_THROW(ValueError) << "rows: got " << row << ", expected 0 to " << num_rows - 1;
    }
    return data[row];
  }

  // Writes the pages of `width` slots of a row; -1 stays -1.
  void look_up(const int32_t* pages, const int32_t* slots, int64_t width, int32_t* table,
               const char* name) const {
    for (int64_t i = 0; i < width; ++i) {
      if (slots[i] >= num_slots) {
        TVM_FFI_THROW(ValueError) << name << ": got " << slots[i] << ", expected at most "
                                  << num_slots - 1;
      }
      table[i] = slots[i] < 0 ? -1 : pages[slots[i]];
    }
  }
};

// Whether the first `length` slots are those of different pages and the others are none.
bool well_formed(const int32_t* slots, int64_t width, int64_t length, int32_t num_pages) {
  // Only -1 is negative, so a sign bit survives "or" if one slot is none, and "and" if all are.
  int32_t within = 0, after = -1;
  for (int64_t i = 0; i < length; ++i) within |= slots[i];
  for (int64_t i = length; i < width; ++i) after &= slots[i];
  return num_pages == length && within >= 0 && after < 0;
}

// Removes what is away from the slots of a row, and returns how many of the first `length` are left.
int32_t drop_away(int32_t* slots, int64_t width, int32_t length) {
  int32_t kept = 0, left = length;
  for (int64_t i = 0; i < width; ++i) {
    if (slots[i] != kAway) {
      slots[kept++] = slots[i];
    } else if (i < length) {
      --left;
    }
  }
  std::fill(slots + kept, slots + width, -1);
  return left;
}

// attended [R, K + 1] has the tail page after the first lengths[r] pages that are not away. `counts`:
// hits, misses and malformed selections of the rows before num_real_rows. `dense`: [R], rows that
// attend the tail page beside any number of pages. Both may be null.
void diff_tables(Arguments& in) {
  LruDiffParams p;
  const TensorView selection = in.tensor();
  const int32_t* length_of = in.data<const int32_t>("lengths");
  p.rows = in.data<const int64_t>("rows");
  p.capacity = in.data<const int32_t>("capacity");
  p.num_real_rows = *in.data<const int32_t>("num_real_rows");
  const TensorView host_page_table = in.tensor();
  p.page_limits = in.data<const int32_t>("num_pages");
  const int32_t* tails = in.data<const int32_t>("tail_pages");
  const int32_t* tail_tokens = in.data<const int32_t>("tail_lens");
  const bool* dense = in.data_or_null<const bool>("dense");
  int64_t* counts = in.data_or_null<int64_t>("counts");
  const TensorView slot_pages = in.tensor();
  p.lru_order = rows_of<int32_t>(in.tensor(), "lru_order");
  const DevicePages pages(in.tensor());
  in.skip(1);  // page_slots
  const Rows<int32_t> attended = rows_of<int32_t>(in.tensor(), "attended");
  int32_t* tokens = in.data<int32_t>("seq_lens");
  const Rows<int32_t> loads = rows_of<int32_t>(in.tensor(), "loads");
  p.load_host_pages = rows_of<int32_t>(in.tensor(), "load_host_pages");
  p.num_hits = in.data<int32_t>("num_hits");
  p.num_misses = in.data<int32_t>("num_misses");
  const auto page_size = in.number<int32_t>(), tail_below = in.number<int32_t>();
  p.waits = in.number<bool>();
  p.set(selection, host_page_table, slot_pages);
  const int64_t width = p.width;
  for (int64_t r = 0; r < p.num_rows; ++r) {
    if (length_of[r] < 0 || length_of[r] > width) {
      TVM_FFI_THROW(ValueError) << "lengths: got " << length_of[r] << ", expected 0 to " << width;
    }
  }
  // Slots stand where their pages will.
  p.curr_device_slots = attended;
  p.load_device_slots = loads;
  run_lru_diff(p);
  const int64_t counted = counts == nullptr ? 0 : p.num_real_rows;
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const int32_t* own = pages.row(p.rows[r]);
    int32_t length = length_of[r];
    int32_t* entries = attended[r];
    if (r < counted) {
      counts[0] += p.num_hits[r];
      counts[1] += p.num_misses[r];
      counts[2] += !well_formed(entries, width, length, p.num_hits[r] + p.num_misses[r]);
    }
    const bool has_tail =
        length < tail_below || tail_tokens[r] < page_size || (dense != nullptr && dense[r]);
    if (!p.waits) length = drop_away(entries, width, length);
    pages.look_up(own, entries, width, entries, "curr_device_slots");
    pages.look_up(own, loads[r], width, loads[r], "load_device_slots");
    entries[width] = -1;
    entries[length] = tails[r];
    tokens[r] = length * page_size + (has_tail ? tail_tokens[r] : 0);
  }
}

HISPARSE_EXPORT_KERNEL(diff_tables)

}  // namespace
}  // namespace hisparse
