// sketch_score: log-sum-exp of a page's logits, straight from the sketches by host page; of tail
// pages from their keys.
//
// A token's logit is q.base plus, for each detailed channel, q * scale * (code - 1.5). The latter
// sum is of integers: queries are rounded to 8 bits, and a page's scales to kTopLevel levels or, without
// AVX-512, both and their products to 8 bits. This changes logits by much less than the two bits of a
// code do.
#include "parallel.h"
#include "simd.h"
#include "sketch.h"
#include "sketch_decode.h"
#include "sketch_dot.h"
#include "sketch_nibbles.h"
#include "sketch_start.h"
#include "sketch_start_avx512.h"
#include "tail.h"
#include "tensors.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

namespace hisparse {
namespace {

struct SketchScoreParams {
  const float* query;              // [B, Hq, D]
  Rows<const uint8_t> sketches;    // [host pages, Hkv, bytes]
  Rows<const int32_t> host_pages;  // [B, P]
  const int32_t* num_pages;        // [B]
  float* scores;                   // [B, Hq, P]
  const Tails* tails;
  float* tail_lse;                 // [B, Hq]
  float scale;                     // of the logits
  int64_t batch, num_columns, num_host_pages;
  int32_t q_heads, kv_heads;
  SketchLayout layout;
};

constexpr int64_t kPagesPerItem = 32;
// Exponents of weights stay within these bounds, and a total with one at a bound is not used.
constexpr float kLeast = -126, kMost = 120;
constexpr float kLeastTotal = 0x1p-90f, kMostTotal = 0x1p119f;

// 2^x, relative error about 1e-4. Where it is far from 1, it is inf, 0 or within the bounds above.
HISPARSE_INLINE Floats power_of_two(Floats x) {
#if defined(__AVX512DQ__)
  // x less its floor, which scalef_ps takes as exponent.
  const Floats f = bit_cast<Floats>(_mm512_reduce_ps(bit_cast<__m512>(x), _MM_FROUND_TO_NEG_INF));
  const Floats poly = ((0.07802483f * f + 0.22606674f) * f + 0.69583366f) * f + 0.99992522f;
  return bit_cast<Floats>(_mm512_scalef_ps(bit_cast<__m512>(poly), bit_cast<__m512>(x)));
#else
#if defined(__AVX2__) && !defined(__AVX512F__)
  // GCC makes two instructions of each comparison.
  const __m256 high = _mm256_max_ps(bit_cast<__m256>(x), _mm256_set1_ps(kLeast));
  x = bit_cast<Floats>(_mm256_min_ps(high, _mm256_set1_ps(kMost)));
#else
  x = x > kLeast ? x : splat(kLeast);
  x = x < kMost ? x : splat(kMost);
#endif
  // Adding this constant leaves no bits for a fraction, which rounds to the nearest integer.
  const Floats magic = splat(12582912.0f);
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  const Floats poly = ((0.05517166f * f + 0.24261112f) * f + 0.69326099f) * f + 0.99992807f;
  return bit_cast<Floats>(bit_cast<Ints>(poly) + (bit_cast<Ints>(shifted) << 23));
#endif
}

// The steps below take G queries, from `done` on, of each head in a tile.

// Sums of products of queries and codes.
template <int G, typename Layout>
HISPARSE_NOINLINE void add_codes(Tile<Layout>& tile) {
  // So many have sums of 16 bits: of each, two channels that are 3 times a byte.
  constexpr int32_t kMostQuads = 40;
  const SketchLayout l = tile.layout();
  const int32_t row = l.code_bytes(), quads = tile.quads(), count = tile.count;
  const int32_t whole = row == 4 ? l.num_channels / kQuad : 0;  // quads without gaps
  const uint8_t *levels = tile.multiples.data(), *chosen = tile.chosen.data();
  Ints* out = tile.sums.data();
  for (int32_t i = 0; i < count; ++i) {
    tile.fetch_next(i, 1);
    const uint8_t* packed = tile.sketches[i] + l.codes();
    for (int32_t t = 0; t < row; t += 4, out += kVectors * kQueries) {
      for (int32_t first = 0; first < quads; first += kMostQuads) {
        Sums sums[kVectors][G] = {};
        const auto add = [&](const uint8_t* own, int32_t quad) HISPARSE_INLINED {
          Bytes codes[kVectors];
          decode_quad(own, levels + quad * 16, codes);
          unroll<G>([&](auto g) HISPARSE_INLINED {
            const Bytes some = repeat_four(chosen_by(chosen, tile, g, quad));
            unroll<kVectors>([&](auto v) HISPARSE_INLINED {
              sums[v][g] = add_products(sums[v][g], codes[v], some);
            });
          });
        };
        const int32_t end = std::min(first + kMostQuads, quads);
        int32_t quad = first;
        for (; quad < std::min(end, whole); ++quad) add(packed + quad * 16, quad);
        for (; quad < end; ++quad) {
          uint8_t copy[4 * kQuad];
          const int32_t channel = quad * kQuad;
          copy_codes(packed + channel * row + t, row, std::min(kQuad, l.num_channels - channel),
                     row - t, copy);
          add(copy, quad);
        }
        unroll<kVectors>([&](auto v) HISPARSE_INLINED {
          unroll<G>([&](auto g) HISPARSE_INLINED {
            Ints& place = out[v * kQueries + g];
            place = first == 0 ? join_pairs(sums[v][g]) : place + join_pairs(sums[v][g]);
          });
        });
      }
    }
    levels += 4 * tile.places();
    chosen += tile.chosen_stride();
  }
}

// Totals: sums of the tokens' weights, as far as tokens differ.
template <int G, typename Layout>
HISPARSE_NOINLINE void add_weights(Tile<Layout>& tile, int32_t done) {
  const int32_t count = tile.count, page_size = tile.layout().page_size;
  const Ints* sums = tile.sums.data();
  for (int32_t i = 0; i < count; ++i) {
    tile.fetch_next(i, 2);
    Floats weights[kQueries] = {};
    const auto powers = load_vector<Vec<float, kQueries>>(tile.units[i]) * kLog2E;
    for (int32_t t = 0; t < page_size; t += kTokens) {
      for (int v = 0; v < kVectors; ++v, sums += kQueries) {
        for (int g = 0; g < G; ++g) {
          Floats weight = power_of_two(__builtin_convertvector(sums[g], Floats) * powers[g]);
          if (page_size - t < kTokens) weight = token_of(v) < page_size - t ? weight : Floats{};
          weights[g] = t + v == 0 ? weight : weights[g] + weight;
        }
      }
    }
    for (int g = G; g < kQueries; ++g) weights[g] = splat(1.0f);  // no query, and no total lost
    const auto total = reduce_four(weights);
    std::memcpy(tile.totals + i * tile.apart + done, &total, sizeof(total));
  }
}

// A score is its top + log(total).
template <int G, typename Layout, typename Of>
void score_queries(const Of& queries, Tile<Layout>& tile, int32_t done) {
  start_scores<G>(queries, tile, done);
  if constexpr (Layout::kBits == 4) {
    add_nibbles<G>(tile);
  } else {
    add_codes<G>(tile);
  }
  add_weights<G>(tile, done);
}

// The last few queries of a group, at most kQueries.
template <int G = kQueries, typename Layout, typename Of>
void score_some(int32_t left, const Of& queries, Tile<Layout>& tile, int32_t done) {
  if constexpr (G > 0) {
    if (left == G) return score_queries<G>(queries, tile, done);
    score_some<G - 1>(left, queries, tile, done);
  }
}

template <typename Layout, typename Of>
void score_tile(const Of& queries, Tile<Layout>& tile) {
  if constexpr (Layout::kBits == 2) decode_levels(tile);
  for (int32_t done = 0; done < tile.group; done += kQueries) {
    tile.last = done + kQueries >= tile.group;
    score_some(std::min(kQueries, tile.group - done), queries, tile, done);
  }
}

// The same for one query, whatever its logits: in no place an exponential can overflow.
float score_any(const SketchLayout& l, const float* q, float scale, const uint8_t* sketch) {
  std::vector<float> logits(l.page_size);
  float base = 0;
  for (int32_t d = 0; d < l.dim; ++d) {
    const float unit = scale_of(sketch[l.block_scales() + d / kBlock]);
    base += q[d] * scale * static_cast<int8_t>(sketch[d]) * unit;
  }
  const float middle = static_cast<float>((1 << l.bits) - 1) / 2;
  for (int32_t d = 0, place = 0; d < l.dim && place < l.num_channels; ++d) {
    if (l.bits == 2 && !(sketch[l.channels() + d / 8] >> d % 8 & 1)) continue;
    const float x = q[d] * scale * scale_of(sketch[l.channel_scales() + place]);
    for (int32_t t = 0; t < l.page_size; ++t) {
      logits[t] += x * (static_cast<float>(l.code_of(sketch, place, t)) - middle);
    }
    ++place;
  }
  const float top = *std::max_element(logits.begin(), logits.end());
  float total = 0;
  for (const float logit : logits) total += std::exp(logit - top);
  return base + top + std::log(total);
}

// A run of a request's pages, and of each page's KV heads the scores of its queries.
struct Run {
  int64_t request, first, present;  // pages first to present - 1
  int32_t stride;              // of queries: a group in whole blocks
  Buffer<float> tops, totals;  // [present - first, KV heads, stride]

  Run(const SketchScoreParams& p, int64_t b, int64_t from)
      : request(b), first(from),
        present(std::clamp(int64_t{p.num_pages[b]}, from,
                           std::min(from + kPagesPerItem, p.num_columns))),
        stride(round_up(p.q_heads / p.kv_heads, kQueries)),
        tops((present - first) * p.kv_heads * stride + kLanes),
        totals((present - first) * p.kv_heads * stride + kLanes) {
    // What fills the last register is not lost.
    std::fill_n(totals.data() + (present - first) * p.kv_heads * stride, kLanes, 1.0f);
  }
};

// This thread's tile. It is kept: to allocate one takes time in each run.
template <typename Layout>
Tile<Layout>& tile_of(const Layout& layout, int32_t group) {
  static thread_local std::optional<Tile<Layout>> kept;
  if (!kept || kept->group != group || !(kept->layout() == layout.get())) {
    kept.emplace(layout, group);
  }
  return *kept;
}

// A run's sketches, tile by tile: as they lie or, with four bits, a head's in some pages, for which
// its queries are scaled.
template <typename Layout, typename Of>
void score_sketches(const SketchScoreParams& p, const Layout& layout, const Of& queries, Run& run) {
  constexpr int32_t kPages = Layout::kBits == 4 ? Tile<Layout>::kAhead : 1;
  const int32_t bytes = layout.get().num_bytes();
  const int32_t* host_pages = p.host_pages[run.request];
  thread_local std::vector<const uint8_t*> sketches;
  sketches.clear();
  for (int64_t first = run.first; first < run.present; first += kPages) {
    for (int32_t head = 0; head < p.kv_heads; ++head) {
      for (int64_t page = first; page < std::min(first + kPages, run.present); ++page) {
        sketches.push_back(p.sketches[host_pages[page]] + head * bytes);
      }
    }
  }
  const auto count = static_cast<int32_t>(sketches.size());
  sketches.resize(count + 2 * kTile, sketches.back());
  Tile<Layout>& tile = tile_of(layout, p.q_heads / p.kv_heads);
  tile.apart = kPages == 1 ? run.stride : p.kv_heads * run.stride;
  const auto score = [&](int32_t done, int32_t most, int64_t place) {
    tile.count = std::min(kTile, most);
    tile.sketches = &sketches[done];
    tile.tops = run.tops.data() + place * run.stride;
    tile.totals = run.totals.data() + place * run.stride;
    score_tile(queries, tile);
  };
  if constexpr (Layout::kBits == 4) {
    for (int32_t done = 0, page = 0; done < count; page += kPages) {
      const int32_t some = std::min(kPages, (count - done) / p.kv_heads);
      for (int32_t head = 0; head < p.kv_heads; ++head) {
        tile.sketches = &sketches[done];
        std::fill_n(tile.heads, kTile, run.request * p.kv_heads + head);
        scale_queries(queries, tile, some);
        for (int32_t i = 0; i < some; i += kTile) {
          score(done + i, some - i, int64_t{page + i} * p.kv_heads + head);
        }
        done += some;
      }
    }
  } else {
    for (int32_t done = 0, head = 0; done < count; done += kTile) {
      for (int64_t& own : tile.heads) {
        own = run.request * p.kv_heads + head;
        head = head + 1 < p.kv_heads ? head + 1 : 0;
      }
      score(done, count - done, done);
    }
  }
}

// Replaces those scores of a run whose totals are of no use.
void score_again(const SketchScoreParams& p, const Run& run) {
  const int64_t pages = run.present - run.first, row = p.kv_heads * run.stride;
  const int32_t group = p.q_heads / p.kv_heads;
  for (int32_t h = 0; h < p.q_heads; ++h) {
    const int64_t query = run.request * p.q_heads + h;
    const float* total = run.totals.data() + h / group * run.stride + h % group;
    for (int64_t i = 0; i < pages; ++i, total += row) {
      if (*total > kLeastTotal && *total < kMostTotal) continue;
      const uint8_t* page = p.sketches[p.host_pages[run.request][run.first + i]];
      const float* q = p.query + query * p.layout.dim;
      p.scores[query * p.num_columns + run.first + i] =
          score_any(p.layout, q, p.scale, page + h / group * p.layout.num_bytes());
    }
  }
}

void write_scores(const SketchScoreParams& p, Run& run) {
  const int64_t pages = run.present - run.first, row = p.kv_heads * run.stride;
  Ints lost = {};  // -1 where a total is of no use
  for (int64_t i = 0; i < pages * row; i += kLanes) {
    const Floats total = Float32::load(run.totals.data() + i);
    lost |= (total < splat(kLeastTotal)) | (total > splat(kMostTotal));
    float* top = run.tops.data() + i;
    store(top, Float32::load(top) + log_of(total));
  }
  const int32_t group = p.q_heads / p.kv_heads;
  for (int32_t h = 0; h < p.q_heads; ++h) {
    float* out = p.scores + (run.request * p.q_heads + h) * p.num_columns + run.first;
    const float* top = run.tops.data() + h / group * run.stride + h % group;
    for (int64_t i = 0; i < pages; ++i, top += row) out[i] = *top;
  }
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) any |= lost[lane] != 0;
  if (any) score_again(p, run);
}

// Scores all pages, also the tail pages; false if one of them is not among the host pages.
template <typename Of, typename Layout>
bool score_all(const SketchScoreParams& p, const Layout& layout) {
  const Of queries(p.query, p.scale, p.batch * p.kv_heads, p.q_heads / p.kv_heads, p.layout.dim);
  const int64_t runs = (p.num_columns + kPagesPerItem - 1) / kPagesPerItem;
  const double work = static_cast<double>(p.batch * p.num_columns) * p.q_heads * 25;
  std::atomic<bool> in_range{true};
  const int64_t tails = p.tails->rows(), items = tails + p.batch * runs;
  parallel_for(items, num_threads(items, work), [&](int64_t item) {
    if (item < tails) {
      const int64_t count = p.batch * p.q_heads / tails;
      p.tails->score(item, p.query + item * count * p.layout.dim, count, p.scale,
                     p.tail_lse + item * count);
      return;
    }
    item -= tails;
    Run run(p, item / runs, item % runs * kPagesPerItem);
    for (int64_t page = run.first; page < run.present; ++page) {
      const int32_t host_page = p.host_pages[run.request][page];
      if (host_page < 0 || host_page >= p.num_host_pages) in_range = false;
    }
    if (!in_range || run.present == run.first) return;
    score_sketches(p, layout, queries, run);
    write_scores(p, run);
  });
  return in_range;
}

void sketch_score(Arguments& in) {
  const TensorView query = in.tensor(), sketches = in.tensor(), host_page_table = in.tensor(),
                   num_pages = in.tensor();
  const Tails tails(in);
  in.skip(6);  // New tokens, which are written before.
  const TensorView scores = in.tensor();
  float* tail_lse = in.data_or_null<float>("tail_lse");
  const auto dim = in.number<int64_t>(), page_size = in.number<int64_t>(),
             num_channels = in.number<int64_t>(), numbered = in.number<int64_t>(),
             bits = in.number<int64_t>();
  SketchScoreParams p;
  p.scale = static_cast<float>(in.number<double>());
  const AsFloats floats(query, "query");
  p.query = floats.data();
  p.sketches = {static_cast<const uint8_t*>(sketches.data_ptr()), sketches.stride(0)};
  p.host_pages = rows_of<const int32_t>(host_page_table, "host_page_table");
  p.num_pages = data_of<const int32_t>(num_pages, "num_pages");
  p.scores = data_of<float>(scores, "scores");
  p.tails = &tails;
  p.tail_lse = tail_lse;
  p.batch = query.size(0);
  p.num_columns = scores.size(2);
  p.num_host_pages = sketches.size(0);
  p.q_heads = static_cast<int32_t>(query.size(1));
  p.kv_heads = static_cast<int32_t>(sketches.size(1));
  p.layout = {static_cast<int32_t>(dim), static_cast<int32_t>(page_size),
              static_cast<int32_t>(num_channels), numbered != 0, static_cast<int32_t>(bits)};
  require_sketches(sketches, p.layout);
  // The usual shapes take a third less time if they are known.
  const auto score = [&](auto wide, auto narrow, auto any, auto* queries) {
    using Of = std::remove_pointer_t<decltype(queries)>;
    return p.layout == wide.get()     ? score_all<Of>(p, wide)
           : p.layout == narrow.get() ? score_all<Of>(p, narrow)
                                      : score_all<Of>(p, any);
  };
  const bool in_range =
      p.layout.bits == 4
          ? score(KnownLayout<128, 16, 128, false, 4>(), KnownLayout<64, 16, 64, false, 4>(),
                  AnyLayout<false, 4>{p.layout}, static_cast<WholeQueries*>(nullptr))
          : score(KnownLayout<128, 16, 40, false>(), KnownLayout<64, 16, 20, false>(),
                  AnyLayout<false>{p.layout}, static_cast<Queries*>(nullptr));
  if (!in_range) {
    require_host_pages(p.host_pages, p.num_pages, p.batch, p.num_columns, p.num_host_pages);
  }
}

HISPARSE_EXPORT_KERNEL(sketch_score)

}  // namespace
}  // namespace hisparse
