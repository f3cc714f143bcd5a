// The two hot loops of lru_diff: which slots hold a selected page, and where each selected page is.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>

namespace hisparse {

// Entries that `hits` and `others` need room for beyond the last one: whole vectors are stored.
constexpr int32_t kPartitionSlack = 16;

struct Partition {
  const int32_t* order;     // [capacity], slots from cold to hot
  const int32_t* pages;     // [num_slots], page of each slot, -1 if none
  const uint8_t* selected;  // [num_pages + 2]: 1 at p + 1 if page p is selected; 0 at both ends
  uint8_t* is_hit;          // [capacity + kPartitionSlack], scratch
  int32_t* hits;            // out: slots whose page is selected, in order
  int32_t* others;          // out: the rest, in order
  int32_t capacity, num_slots, num_pages;
  int32_t num_hits = 0, num_others = 0;

  // Pages beyond the table are not selected. False if `order` holds what is no slot.
  bool run() {
    uint32_t largest = 0;
    for (int32_t i = 0; i < capacity; ++i) {
      largest = std::max(largest, static_cast<uint32_t>(order[i]));
    }
    if (capacity > 0 && largest >= static_cast<uint32_t>(num_slots)) return false;
    look_up();
    split();
    return true;
  }

 private:
  // Scalar on purpose: the loads are independent, and gather instructions are slower here.
  void look_up() {
    const uint32_t beyond = static_cast<uint32_t>(num_pages) + 1u;
    // Copies, for a store of bytes might alias the members.
    const int32_t* const slots = order;
    const int32_t* const page_of = pages;
    const uint8_t* const wanted = selected;
    uint8_t* const flags = is_hit;
    const int64_t count = capacity;
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; ++i) {
      uint32_t page = static_cast<uint32_t>(page_of[slots[i]]);
#ifdef __x86_64__
      asm("" : "+r"(page));  // Keeps the compiler from vectorising with gathers.
#endif
      flags[i] = wanted[std::min(page + 1u, beyond)];
    }
  }

  void split() {
    int32_t first = 0;
#ifdef __AVX512F__
    for (; first + 16 <= capacity; first += 16) {
      const __m512i slot = _mm512_loadu_si512(order + first);
      const __m128i flags = _mm_loadu_si128(reinterpret_cast<const __m128i*>(is_hit + first));
      const __m512i wide = _mm512_cvtepu8_epi32(flags);
      const __mmask16 hit = _mm512_test_epi32_mask(wide, wide);
      const __mmask16 miss = static_cast<__mmask16>(~hit);
      // Compressed in a register: compressing stores are slow on some processors.
      _mm512_storeu_si512(hits + num_hits, _mm512_maskz_compress_epi32(hit, slot));
      _mm512_storeu_si512(others + num_others, _mm512_maskz_compress_epi32(miss, slot));
      const int32_t count = __builtin_popcount(hit);
      num_hits += count;
      num_others += 16 - count;
    }
#endif
    int32_t hit = num_hits, other = num_others;
    for (; first < capacity; ++first) {
      hits[hit] = others[other] = order[first];
      hit += is_hit[first];
      other += 1 - is_hit[first];
    }
    num_hits = hit;
    num_others = other;
  }
};

// Looks up the slot of each selected page; `slot_of` is -1 at entry 0 and where a page is in none.
// Writes the positions of the pages in no slot to `missing`, which needs room for `width` and
// `kPartitionSlack` entries, and returns how many there are.
inline int32_t find_slots(const int32_t* selection, int32_t width, const int32_t* slot_of,
                          int32_t* current, int32_t* missing) {
  int32_t i = 0, count = 0;
#ifdef __AVX512F__
  const __m512i none = _mm512_set1_epi32(-1);
  __m512i position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= width; i += 16) {
    const __m512i page = _mm512_max_epi32(_mm512_loadu_si512(selection + i), none);
    const __m512i slot = _mm512_i32gather_epi32(page, slot_of + 1, 4);
    _mm512_storeu_si512(current + i, slot);
    const __mmask16 wanted = _mm512_cmpneq_epi32_mask(page, none);
    const __mmask16 absent = _mm512_mask_cmpeq_epi32_mask(wanted, slot, none);
    _mm512_storeu_si512(missing + count, _mm512_maskz_compress_epi32(absent, position));
    count += __builtin_popcount(absent);
    position = _mm512_add_epi32(position, _mm512_set1_epi32(16));
  }
#endif
  for (; i < width; ++i) {
    const int32_t page = std::max(selection[i], -1);
    current[i] = slot_of[page + 1];
    missing[count] = i;
    count += (page >= 0) & (current[i] < 0);
  }
  return count;
}

}  // namespace hisparse
