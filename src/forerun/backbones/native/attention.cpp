// Attention: queries that look at the same keys and values go through them together.

#include "model.h"
#include "numbers.h"

#include <utility>

// Some numbers of two sixteens, by their places.
#if defined(__clang__)
#define CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t SixteenPlaces __attribute__((vector_size(64)));
#define CHOSEN(a, b, ...) __builtin_shuffle(a, b, SixteenPlaces{__VA_ARGS__})
#endif

namespace forerun {
namespace {

#if defined(__AVX512F__)
constexpr int SEEN_AT_ONCE = 256;  // numbers that are added up: they stay in registers
#else
constexpr int SEEN_AT_ONCE = 64;
#endif
constexpr int MOST_HEAD = 512;  // numbers
constexpr int AHEAD = 6;  // slots

// Calls do(place of the first, count) for the slots [first, end) of a lane, page by page.
template <typename Do>
inline void each_page(const Rows& rows, int64_t lane, int64_t first, int64_t end, Do run) {
    const int64_t* pages = rows.pages + lane * rows.pages_per_lane;
    while (first < end) {
        const int64_t within = first % rows.page_size;
        const int64_t count = std::min(end - first, rows.page_size - within);
        run(pages[first / rows.page_size] + within, count);
        first += count;
    }
}

// Begin to load what is needed soon: the next slots of a head lie far apart.
inline void fetch(const float* from, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(from + i);
}

// Products of a query and a key: sixteen sums.
template <int D>
inline Wide products(const float* q, const float* key) {
    Wide all = {};
    for (int i = 0; i < D; i += 16) all += load<Wide>(q + i) * load<Wide>(key + i);
    return all;
}

#if defined(__AVX512F__)

// What `in_four` makes of four of them, in the order of the keys.
inline Sixteen four_in_four(const Sixteen* all) {
    const auto halved = [](const Sixteen& a, const Sixteen& b) {
        return CHOSEN(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               CHOSEN(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    return halved(halved(all[0], all[1]), halved(all[2], all[3]));
}

// Scores of sixteen keys: the same sums, with fewer moves within registers.
template <int D>
inline void score_sixteen(const float* q, const float* keys, int64_t step, float scale,
                          float* scores) {
    const auto in_pairs = [](const Sixteen& a, const Sixteen& b) {
        return CHOSEN(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
               CHOSEN(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
    };
    Sixteen fours[4];
#pragma GCC unroll 4
    for (int f = 0; f < 4; ++f) {
        Sixteen all[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) all[k] = products<D>(q, keys + (4 * f + k) * step);
        fours[f] = four_in_four(all);
    }
    const Sixteen found = in_pairs(in_pairs(fours[0], fours[1]), in_pairs(fours[2], fours[3]));
    const Sixteen scaled =
        CHOSEN(found, found, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15) * scale;
    std::memcpy(scores, &scaled, sizeof scaled);
}

#endif

// Scores of some keys, that lie a step apart. Not inlined: it is called in many places, which would all
// be compiled.
template <int D>
__attribute__((noinline)) void score(const float* q, const float* keys, int64_t step, int64_t size,
                                     int64_t count, float scale, float* scores) {
    int64_t s = 0;
    if constexpr (D > 0) {
#if defined(__AVX512F__)
        for (; s + 16 <= count; s += 16)
            score_sixteen<D>(q, keys + s * step, step, scale, scores + s);
#endif
        for (; s + 4 <= count; s += 4) {
            Four found[4];
            for (int k = 0; k < 4; ++k) found[k] = in_four(products<D>(q, keys + (s + k) * step));
            const Four four = added_in_pairs(added_in_pairs(found[0], found[1]),
                                             added_in_pairs(found[2], found[3])) * scale;
            std::memcpy(scores + s, &four, sizeof four);
        }
    }
    for (; s < count; ++s) scores[s] = dot(q, keys + s * step, size) * scale;
}

// Scores to shares of a whole that is returned. Sums are of every sixteenth.
__attribute__((noinline)) float share_out(float* scores, int64_t count) {
    const float most = largest(scores, count);
    for (int64_t s = 0; s < count; ++s) scores[s] = exponential(scores[s] - most);
    Wide mass = {};
    int64_t s = 0;
    for (; s + 16 <= count; s += 16) mass += load<Wide>(scores + s);
    Wide rest = {};
    std::memcpy(&rest, scores + s, (count - s) * sizeof(float));
    return added(in_four(mass + rest));
}

// One row of one head, and what it looks at: slots [0, near) and [lo, hi) of its lane.
struct Query {
    const float* q;
    float* scores;
    float* to;
    int64_t near, lo, hi;
};

// The keys and values of one head in one lane; those of a slot lie a step behind the last one's.
struct Seen {
    int64_t lane;
    const float* keys;
    const float* values;
    int64_t step, size;
};

// What queries add up of values: numbers that stay in registers if heads have a size that is known.
template <int D>
using Sums = std::conditional_t<(D > 0), Lanes, Four>[(D ? D : MOST_HEAD) / (D ? LANES : 4)];

// Add values of some slots to the sums of N queries, whose shares of these begin at `from`.
template <int D, int N>
void gather(const Seen& seen, const Query* query, int64_t place, int64_t slots, int64_t from,
            Sums<D>* sums) {
    using Some = std::remove_extent_t<Sums<D>>;
    constexpr int64_t wide = sizeof(Some) / sizeof(float);
    const int64_t size = D ? D : seen.size;
    Sums<D> own[N];
    std::memcpy(own, sums, sizeof own);
    for (int64_t s = 0; s < slots; ++s) {
        const float* value = seen.values + (place + s) * seen.step;
        fetch(value + AHEAD * seen.step, size);
        for (int64_t i = 0; i < size / wide; ++i) {
            const Some some = load<Some>(value + wide * i);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) own[n][i] += query[n].scores[from + s] * some;
        }
    }
    std::memcpy(sums, own, sizeof own);
}

// Attention of some queries that look at the same slots, but for the last ones. What one of them adds
// up, and in which order, does not hang on who is beside it.
template <int D, int... LESS>
void attend_together(const Rows& rows, const Seen& seen, const Query* query, int count,
                     std::integer_sequence<int, LESS...>) {
    constexpr decltype(&gather<D, 1>) gathers[] = {gather<D, LESS + 1>...};
    const float scale = 1.0f / std::sqrt(static_cast<float>(seen.size));
    int64_t common = query[0].near;
    for (int n = 1; n < count; ++n) common = std::min(common, query[n].near);
    // what only one of them looks at: run(place of the first, slots, how many it has seen before)
    const auto each_own = [&](const Query& one, auto run) {
        int64_t before = common;
        const auto counted = [&](int64_t place, int64_t slots) {
            run(place, slots, before);
            before += slots;
        };
        each_page(rows, seen.lane, common, one.near, counted);
        each_page(rows, seen.lane, one.lo, one.hi, counted);
        return before;
    };
    const auto look = [&](const Query& one, int64_t place, int64_t slots, int64_t before) {
        score<D>(one.q, seen.keys + place * seen.step, seen.step, seen.size, slots, scale,
                 one.scores + before);
    };
    int64_t before = 0;
    each_page(rows, seen.lane, 0, common, [&](int64_t place, int64_t slots) {
        // Keys of one head lie so far apart that few of them stay in the nearest cache: several
        // queries go through some of them in turn.
        const int64_t most = count > 1 ? 16 : slots;
        for (int64_t some; slots > 0; slots -= some, place += some, before += some) {
            some = std::min(slots, most);
            for (int64_t s = place; count > 1 && s < place + some; ++s) {
                fetch(seen.keys + (s + most) * seen.step, seen.size);
                fetch(seen.values + s * seen.step, seen.size);
            }
            for (int n = 0; n < count; ++n) look(query[n], place, some, before);
        }
    });
    float mass[sizeof...(LESS)];
    for (int n = 0; n < count; ++n) {
        const auto look_own = [&](int64_t place, int64_t slots, int64_t at) {
            look(query[n], place, slots, at);
        };
        mass[n] = share_out(query[n].scores, each_own(query[n], look_own));
    }
    Sums<D> sums[sizeof...(LESS)] = {};
    before = 0;
    each_page(rows, seen.lane, 0, common, [&](int64_t place, int64_t slots) {
        gathers[count - 1](seen, query, place, slots, before, sums);
        before += slots;
    });
    for (int n = 0; n < count; ++n) {
        each_own(query[n], [&](int64_t place, int64_t slots, int64_t at) {
            gather<D, 1>(seen, query + n, place, slots, at, sums + n);
        });
        const float* found = reinterpret_cast<const float*>(sums[n]);
        for (int64_t i = 0; i < seen.size; ++i) query[n].to[i] = found[i] / mass[n];
    }
}

// A thread's share of queries. Those of the heads that share a key head lie together, row by row.
template <int D>
void attend_with(const Model& model, const Rows& rows, const float* kept, const float* qkv,
                 int64_t part, int64_t parts, float* scores, int64_t slots, float* out) {
    constexpr int most = D ? std::min(MOST_TOGETHER, std::max(1, SEEN_AT_ONCE / D)) : 1;
    const int64_t size = model.head_dim, all = model.heads + 2 * model.key_heads;
    const int64_t fold = model.heads / model.key_heads, beside = rows.rows * fold;
    const int64_t items = rows.rows * model.heads, end = items * (part + 1) / parts;
    for (int64_t item = items * part / parts; item < end;) {
        const int64_t key_head = item / beside, lane = rows.lanes[item % beside / fold];
        const float* keys = kept + key_head * size;
        const float* values = keys + model.key_heads * size;
        const Seen seen = {lane, keys, values, 2 * model.key_heads * size, size};
        Query query[most];
        int count = 0;
        for (; count < most && item < end && item / beside == key_head; ++count, ++item) {
            const int64_t row = item % beside / fold, head = key_head * fold + item % fold;
            if (rows.lanes[row] != lane) break;
            const int64_t near = rows.horizon[row], lo = std::max<int64_t>(rows.lo[row], near);
            query[count] = {qkv + (row * all + head) * size, scores + count * slots,
                            out + (row * model.heads + head) * size, near, lo, rows.hi[row]};
        }
        attend_together<D>(rows, seen, query, count, std::make_integer_sequence<int, most>());
    }
}

}  // namespace

void attend(const Model& model, const Rows& rows, const float* kept, const float* qkv, int64_t part,
            int64_t parts, float* scores, int64_t slots, float* out) {
    const auto run = model.head_dim == 32    ? attend_with<32>
                     : model.head_dim == 64  ? attend_with<64>
                     : model.head_dim == 128 ? attend_with<128>
                                             : attend_with<0>;
    run(model, rows, kept, qkv, part, parts, scores, slots, out);
}

}  // namespace forerun
