// The hot loops of lru_diff.cpp: the slot of each selected page, and the slots that were hit.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

namespace hisparse {

// Spare entries after a compressed list, because whole vectors are stored.
constexpr int32_t kPartitionSlack = 16;

// "No slot" in a table of slots; Slot is as narrow as the slots allow, for the cache's sake.
template <typename Slot>
constexpr Slot kNoSlot = std::numeric_limits<Slot>::max();

// Fills `slot_of[page + 1]` with the slot of each selected page, kNoSlot if no slot holds it. Entry
// 0 and the last one take indices outside the table. `slot_of` has num_pages + 2 entries and may
// hold anything before; entries of pages neither selected nor resident stay undefined.
template <typename Slot>
void map_pages(const int32_t* selection, int32_t width, const int32_t* pages, int32_t num_slots,
               int32_t num_pages, Slot* slot_of) {
  // Clears only the selected entries, or, if they are many, the whole table at once.
  if (num_pages / 16 < width) {
    std::fill_n(slot_of, num_pages + 2, kNoSlot<Slot>);
  } else {
    for (int32_t i = 0; i < width; ++i) slot_of[std::max(selection[i], -1) + 1] = kNoSlot<Slot>;
  }
  const uint32_t beyond = static_cast<uint32_t>(num_pages) + 1u;
  uint32_t largest = 0;
  for (int32_t slot = 0; slot < num_slots; ++slot) {
    largest = std::max(largest, static_cast<uint32_t>(pages[slot]) + 1u);
  }
  if (largest < beyond) {  // As a rule: then nothing has to be clamped.
#pragma GCC unroll 8
    for (int32_t slot = 0; slot < num_slots; ++slot) {
      slot_of[pages[slot] + 1] = static_cast<Slot>(slot);
    }
  } else {
    for (int32_t slot = 0; slot < num_slots; ++slot) {
      slot_of[std::min(static_cast<uint32_t>(pages[slot]) + 1u, beyond)] = static_cast<Slot>(slot);
    }
  }
  slot_of[0] = kNoSlot<Slot>;
}

// Writes the slot of each selected page, or -1, to `current`, and the positions of the pages in no
// slot to `missing`, of `width` entries and the slack. Returns how many are missing.
template <typename Slot>
int32_t find_slots(const int32_t* selection, int32_t width, const Slot* slot_of, int32_t* current,
                   int32_t* missing) {
  int32_t i = 0, count = 0;
#ifdef __AVX512F__
  const __m512i none = _mm512_set1_epi32(-1);
  const __m512i no_slot = _mm512_set1_epi32(static_cast<int32_t>(kNoSlot<Slot>));
  __m512i position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= width; i += 16) {
    const __m512i page = _mm512_max_epi32(_mm512_loadu_si512(selection + i), none);
    // A narrow table is read in pairs: the higher half belongs to the next page.
    const __m512i pair = _mm512_i32gather_epi32(page, slot_of + 1, sizeof(Slot));
    const __m512i slot = _mm512_and_si512(pair, no_slot);
    const __mmask16 found = _mm512_cmpneq_epi32_mask(slot, no_slot);
    const __mmask16 wanted = _mm512_cmpneq_epi32_mask(page, none);
    _mm512_storeu_si512(current + i, _mm512_mask_mov_epi32(none, found, slot));
    const __mmask16 absent = static_cast<__mmask16>(wanted & ~found);
    _mm512_storeu_si512(missing + count, _mm512_maskz_compress_epi32(absent, position));
    count += __builtin_popcount(absent);
    position = _mm512_add_epi32(position, _mm512_set1_epi32(16));
  }
#endif
  for (; i < width; ++i) {
    const int32_t page = std::max(selection[i], -1);
    const Slot slot = slot_of[page + 1];
    current[i] = slot == kNoSlot<Slot> ? -1 : static_cast<int32_t>(slot);
    missing[count] = i;
    count += (page >= 0) & (current[i] < 0);
  }
  return count;
}

// `slot_hit[slot + 1]` is 1 if one of the selected pages is in the slot, else 0.
inline void mark_hits(const int32_t* current, int32_t width, uint8_t* slot_hit,
                      int32_t num_slots) {
  std::fill_n(slot_hit, num_slots + 1, 0);
  for (int32_t i = 0; i < width; ++i) slot_hit[current[i] + 1] = 1;
}

// The slots in LRU order, divided into hit and not hit.
struct Partition {
  const int32_t* order;      // [capacity], slots from cold to hot
  const uint8_t* slot_hit;   // [num_slots], 1 if the slot holds a selected page
  uint8_t* is_hit;           // [capacity + kPartitionSlack], scratch
  int32_t* hits;             // out: hit slots, in order
  int32_t* others;           // out: the rest, in order
  int32_t capacity, num_slots;
  int32_t num_hits = 0, num_others = 0;

  // False if `order` holds an index that is no slot.
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
    // Copies, for a store of bytes might alias the members.
    const int32_t* const slots = order;
    const uint8_t* const hit = slot_hit;
    uint8_t* const flags = is_hit;
    const int64_t count = capacity;
#pragma GCC unroll 8
    for (int64_t i = 0; i < count; ++i) flags[i] = hit[slots[i]];
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

}  // namespace hisparse
