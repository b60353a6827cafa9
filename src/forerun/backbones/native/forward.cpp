// A decoder of the Llama shape on a CPU: rows to logits in one call.
//
// A quantised matrix lies in blocks of some outputs by 32 inputs, each with a scale per output, in the
// order in which they are read. Its inputs become 8-bit numbers in groups of 32 with a scale each.
// A matrix of float32 lies in strips of 16 outputs, input by input; its inputs stay as they are.
// Sums within a block are of whole numbers, and the order of all others does not depend on how many
// rows run: a row has the same bits alone and beside others.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <pthread.h>

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP = 32;
#if defined(__AVX512BW__)
constexpr int SIDE = 16;  // outputs of a block: as many as a register has sums
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int SIDE = 8;
#else
constexpr int SIDE = 4;
#endif
constexpr int MOST_ROWS = 8;  // that meet a block at once
constexpr int STRIP = 16;  // outputs of a strip
#if defined(__AVX512F__)
constexpr int STRIP_ROWS = 16;  // rows that meet a strip at once: their sums stay in registers
constexpr int SEEN_AT_ONCE = 256;  // numbers that attention adds up: they stay there, too
#else
constexpr int STRIP_ROWS = 6;
constexpr int SEEN_AT_ONCE = 64;
#endif
constexpr int MOST_TOGETHER = 4;  // queries that look at slots together
constexpr int BLOCK_AHEAD = 2048;  // bytes: a block is loaded so far before it is met
constexpr int STRIP_AHEAD = 48;  // inputs: a strip is loaded so far before it is met
constexpr int FLOATS = 32;  // bits
constexpr int MOST_HEAD = 512;  // numbers
constexpr int AHEAD = 6;  // slots

struct Matrix {
    const uint8_t* blocks;  // [outputs / SIDE][inputs / 32] blocks, or [outputs / 16] strips
    const float* bias;
    int64_t outputs, inputs, bits;
};

struct Layer {
    const float* norm_attn;
    Matrix qkv;
    const float* q_norm;
    const float* k_norm;
    Matrix out;
    const float* norm_mlp;
    Matrix gate_up;
    Matrix down;
};

struct Model {
    int64_t layers, heads, key_heads, head_dim, hidden, inner;
    double eps;
    const Layer* layer;
    const float* embed;
    const float* turns;  // [position][head_dim / 2] cosines and sines, two numbers each
    const float* norm;
    Matrix head;
};

struct Rows {
    int64_t rows, reads, threads;
    const int64_t* tokens;
    const int64_t* positions;
    const int64_t* slots;  // where each lives
    const int64_t* lanes;
    const int32_t* horizon;  // a row sees slots [0, horizon) and [lo, hi) of its lane
    const int32_t* lo;
    const int32_t* hi;
    const int64_t* read;  // which rows
    const int64_t* pages;  // [lane][page]: where it begins
    int64_t page_size, pages_per_lane;
    float* const* kept;  // of each layer [slot][keys, values][key head][head_dim]
    float* const* features;  // of some layers [slot][hidden]: what comes out of them
    float* memory;
    float* logits;
};

// Texts that go on with their likeliest tokens, one row each.
struct Texts {
    int64_t steps, vocab, keeps;  // does it keep the logits of every step?
    int64_t* tokens;  // the rows as they move on
    int64_t* positions;
    int64_t* slots;
    int32_t* horizon;
    const int64_t* wanted;  // tokens of each text
    const int64_t* ends;  // tokens that end one, text after text
    const int64_t* ends_until;  // where each text's are over
    const int64_t* impossible;
    int64_t impossible_count;
    int64_t* drawn;  // [step][text]
    float* logits;  // [step][text][vocab], or of one step; those of the first are given
    const volatile int64_t* stop;  // looked at after each token, unless null: if set, no more
};

// A model that takes part in rounds of drafts and verdicts.
struct Runner {
    const Model* model;
    const Rows* rows;  // but for the rows themselves: they are laid out here
    int64_t most_rows, slots;  // of a forward, and that a row sees
    const int64_t* threads;  // that a forward of so many rows takes
    double* seconds;  // that forwards of so many rows took
    int64_t* forwards;  // how many of so many rows there were
    int64_t* looked_at;  // two numbers: (row, slot) pairs, and slots
    const int64_t* impossible;
    int64_t impossible_count;
};

// Texts that go on by drafts and verdicts on them, round after round.
struct Rounds {
    int64_t texts, vocab, rounds, longest;  // of drafts
    int64_t first_ends;  // is it over for all once one text has ended?
    double seconds;  // that all rounds should take at most
    int32_t* tokens;  // [text][pitch]
    int64_t pitch;
    int64_t* length;  // of each text, and the following likewise
    int64_t* reach;  // of the next copy; afterwards twice what is accepted and one more; -1: any
    int64_t* held;  // tokens that the draft model has run
    const int64_t* lanes;
    const int64_t* wanted;  // tokens that a text has when it is full
    const int64_t* room;  // slots that it may write to
    const int64_t* most;  // tokens of a draft
    const int64_t* run;  // of last tokens that is looked up for a copy; 0: a model drafts
    const int64_t* mask;  // what stands for a blank, if that one fills blanks; else -1
    const int64_t* shifted;  // does a row of it speak of the token after its own?
    const int64_t* ends;  // tokens that end one, text after text
    const int64_t* ends_until;  // where each text's are over
    int64_t* found;  // [round][text]: drafted tokens, -1 of who is over; accepted; token; the draft
    const volatile int64_t* stop;  // looked at after each round: if set, no more
};

// -- one block against some rows ------------------------------------------------------------------

constexpr int64_t block_bytes(int bits) { return bits == 4 ? 20 * SIDE : 34 * SIDE; }

// Rows as products take them: as they are, or in codes. Those whose codes meet a block together lie
// together, group by group.
struct Inputs {
    float* plain;
    int8_t* codes;  // of each group
    float* scales;
    float* sums;  // of what the codes stand for
    int32_t* wholes;  // sums of the codes
    int64_t rows, groups;

    // Where a group of a row lies. Rows come in eights; then come the rest.
    int64_t at(int64_t row, int64_t group) const {
        const int64_t first = row / MOST_ROWS * MOST_ROWS;
        const int64_t count = std::min<int64_t>(MOST_ROWS, rows - first);
        return first * groups + group * count + row - first;
    }
};

inline float from_bfloat16(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

#if defined(__ARM_FEATURE_DOTPROD)

inline float32x4_t four_bfloat16(const uint8_t* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)), 16));
}

template <int BITS, int R>
inline void meet(const uint8_t* block, int64_t groups, const Inputs& x, int64_t row, float* y) {
    float32x4_t total[R];
    for (int r = 0; r < R; ++r) total[r] = vdupq_n_f32(0);
    const int8_t* codes = x.codes + row * groups * GROUP;
    const float* scales = x.scales + row * groups;
    [[maybe_unused]] const float* sums = x.sums + row * groups;
    for (int64_t g = 0; g < groups; ++g, block += block_bytes(BITS)) {
        int8x16_t w[8];
        if constexpr (BITS == 4) {
            for (int j = 0; j < 4; ++j) {
                const uint8x16_t pair = vld1q_u8(block + 16 * j);
                w[j] = vreinterpretq_s8_u8(vandq_u8(pair, vdupq_n_u8(15)));
                w[4 + j] = vreinterpretq_s8_u8(vshrq_n_u8(pair, 4));
            }
        } else {
            for (int j = 0; j < 8; ++j) w[j] = vreinterpretq_s8_u8(vld1q_u8(block + 16 * j));
        }
        const float32x4_t scale = four_bfloat16(block + 16 * BITS);
        for (int r = 0; r < R; ++r) {
            const int8_t* at = codes + (g * R + r) * GROUP;
            const int8x16_t first = vld1q_s8(at), second = vld1q_s8(at + 16);
            int32x4_t whole = vdupq_n_s32(0);
            whole = vdotq_laneq_s32(whole, w[0], first, 0);
            whole = vdotq_laneq_s32(whole, w[1], first, 1);
            whole = vdotq_laneq_s32(whole, w[2], first, 2);
            whole = vdotq_laneq_s32(whole, w[3], first, 3);
            whole = vdotq_laneq_s32(whole, w[4], second, 0);
            whole = vdotq_laneq_s32(whole, w[5], second, 1);
            whole = vdotq_laneq_s32(whole, w[6], second, 2);
            whole = vdotq_laneq_s32(whole, w[7], second, 3);
            const float32x4_t sum = vcvtq_f32_s32(whole);
            total[r] = vfmaq_f32(total[r], sum, vmulq_n_f32(scale, scales[g * R + r]));
            if constexpr (BITS == 4)
                total[r] = vfmaq_n_f32(total[r], four_bfloat16(block + 72), sums[g * R + r]);
        }
    }
    for (int r = 0; r < R; ++r) vst1q_f32(y + r * SIDE, total[r]);
}

#elif defined(__AVX512BW__)

// Products of sixteen outputs' weights, four inputs of each, with four codes of a row, added to sums
// of whole numbers: of 32 bits, or of 16 where the processor adds no four products at once and all
// sixteen of a group, of 4 bits by 8, have room in them.
template <int BITS>
struct Weights {
    __m512i w;
#if !defined(__AVX512VNNI__)
    __mmask64 negative = 0;
#endif

    // The instructions take weights without a sign: 128 more than they are, or their size.
    explicit Weights(__m512i codes) : w(codes) {
        if constexpr (BITS == 8) {
#if defined(__AVX512VNNI__)
            w = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
#else
            w = _mm512_abs_epi8(codes);
            negative = _mm512_movepi8_mask(codes);
#endif
        }
    }

    __m512i add_to(__m512i sum, const int8_t* codes) const {
        int32_t four;
        std::memcpy(&four, codes, 4);
        __m512i some = _mm512_set1_epi32(four);
#if defined(__AVX512VNNI__)
        return _mm512_dpbusd_epi32(sum, w, some);
#else
        if constexpr (BITS == 4) return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, some));
        some = _mm512_mask_sub_epi8(some, negative, _mm512_setzero_si512(), some);
        const __m512i pairs = _mm512_maddubs_epi16(w, some);
        return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
    }

    // Sums of a group, from those that were added up; `whole` is the sum of a row's codes.
    static __m512i first([[maybe_unused]] int32_t whole) {
#if defined(__AVX512VNNI__)
        if constexpr (BITS == 8) return _mm512_set1_epi32(-128 * whole);
#endif
        return _mm512_setzero_si512();
    }

    static __m512i last(__m512i sum) {
#if !defined(__AVX512VNNI__)
        if constexpr (BITS == 4) return _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
#endif
        return sum;
    }
};

// Sums of groups, 16 outputs at a time, in registers for all rows at once.
template <int BITS, int R>
inline void meet(const uint8_t* block, int64_t groups, const Inputs& x, int64_t row, float* y) {
    __m512 total[R];
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
    const int8_t* codes = x.codes + row * groups * GROUP;
    const float* scales = x.scales + row * groups;
    [[maybe_unused]] const float* sums = x.sums + row * groups;
    const int32_t* wholes = x.wholes + row * groups;
    const auto sixteen_bfloat16 = [](const uint8_t* from) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    };
    for (int64_t g = 0; g < groups; ++g, block += block_bytes(BITS)) {
        for (int64_t line = 0; line < block_bytes(BITS); line += 64)
            __builtin_prefetch(block + BLOCK_AHEAD + line);
        __m512i whole[R];
        for (int r = 0; r < R; ++r) whole[r] = Weights<BITS>::first(wholes[g * R + r]);
        const auto add = [&](const Weights<BITS>& weights, int64_t at) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                whole[r] = weights.add_to(whole[r], codes + (g * R + r) * GROUP + at);
        };
        // codes of the first sixteen inputs lie below those of the others in 4 bits, else before them
#pragma GCC unroll 8
        for (int j = 0; j < BITS; ++j) {
            const __m512i line = _mm512_loadu_si512(block + 64 * j);
            if constexpr (BITS == 4) {
                const __m512i low = _mm512_set1_epi8(15);
                add(Weights<BITS>(_mm512_and_si512(line, low)), 4 * j);
                add(Weights<BITS>(_mm512_and_si512(_mm512_srli_epi16(line, 4), low)), 16 + 4 * j);
            } else {
                add(Weights<BITS>(line), 4 * j);
            }
        }
        const __m512 scale = sixteen_bfloat16(block + 4 * BITS * SIDE);
        for (int r = 0; r < R; ++r) {
            const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(scales[g * R + r]));
            const __m512 sum = _mm512_cvtepi32_ps(Weights<BITS>::last(whole[r]));
            total[r] = _mm512_fmadd_ps(sum, by, total[r]);
        }
        if constexpr (BITS == 4) {
            const __m512 offset = sixteen_bfloat16(block + 18 * SIDE);
            for (int r = 0; r < R; ++r)
                total[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[g * R + r]), total[r]);
        }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(y + r * SIDE, total[r]);
}

#elif defined(__AVX2__) && defined(__FMA__)

template <int BITS, int R>
inline void meet(const uint8_t* block, int64_t groups, const Inputs& x, int64_t row, float* y) {
    __m256 total[R];
    for (int r = 0; r < R; ++r) total[r] = _mm256_setzero_ps();
    const int8_t* codes = x.codes + row * groups * GROUP;
    const float* scales = x.scales + row * groups;
    [[maybe_unused]] const float* sums = x.sums + row * groups;
    const __m256i ones = _mm256_set1_epi16(1);
    const auto eight_bfloat16 = [](const uint8_t* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    };
    for (int64_t g = 0; g < groups; ++g, block += block_bytes(BITS)) {
        const __m256i* lines = reinterpret_cast<const __m256i*>(block);
        __m256i w[8];
        if constexpr (BITS == 4) {
            const __m256i low = _mm256_set1_epi8(15);
            for (int j = 0; j < 4; ++j) {
                const __m256i pair = _mm256_loadu_si256(lines + j);
                w[j] = _mm256_and_si256(pair, low);
                w[4 + j] = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low);
            }
        } else {
            for (int j = 0; j < 8; ++j) w[j] = _mm256_loadu_si256(lines + j);
        }
        const __m256 scale = eight_bfloat16(block + 4 * BITS * SIDE);
        for (int r = 0; r < R; ++r) {
            __m256i sum = _mm256_setzero_si256();
            for (int j = 0; j < 8; ++j) {
                int32_t four;
                std::memcpy(&four, codes + (g * R + r) * GROUP + 4 * j, 4);
                const __m256i some = _mm256_set1_epi32(four);
                if constexpr (BITS == 4) {  // all sixteen products have room in 16 bits
                    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[j], some));
                } else {  // two have
                    const __m256i signs = _mm256_sign_epi8(some, w[j]);
                    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), signs);
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
                }
            }
            if constexpr (BITS == 4) sum = _mm256_madd_epi16(sum, ones);
            const __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(scales[g * R + r]));
            total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), by, total[r]);
            if constexpr (BITS == 4)
                total[r] = _mm256_fmadd_ps(eight_bfloat16(block + 18 * SIDE),
                                           _mm256_set1_ps(sums[g * R + r]), total[r]);
        }
    }
    for (int r = 0; r < R; ++r) _mm256_storeu_ps(y + r * SIDE, total[r]);
}

#else

template <int BITS, int R>
inline void meet(const uint8_t* block, int64_t groups, const Inputs& x, int64_t row, float* y) {
    for (int i = 0; i < R * SIDE; ++i) y[i] = 0;
    for (int64_t g = 0; g < groups; ++g, block += block_bytes(BITS)) {
        for (int r = 0; r < R; ++r) {
            const int64_t group = row * groups + g * R + r;
            const int8_t* at = x.codes + group * GROUP;
            int32_t sum[SIDE] = {};
            for (int j = 0; j < 4; ++j)
                for (int o = 0; o < SIDE; ++o)
                    for (int i = 0; i < 4; ++i) {
                        const uint8_t low = block[4 * SIDE * j + 4 * o + i];
                        if constexpr (BITS == 4) {
                            sum[o] += (low & 15) * at[4 * j + i] + (low >> 4) * at[16 + 4 * j + i];
                        } else {
                            const uint8_t high = block[16 * SIDE + 4 * SIDE * j + 4 * o + i];
                            sum[o] += static_cast<int8_t>(low) * at[4 * j + i] +
                                      static_cast<int8_t>(high) * at[16 + 4 * j + i];
                        }
                    }
            for (int o = 0; o < SIDE; ++o) {
                const float by = from_bfloat16(block + 4 * BITS * SIDE + 2 * o) * x.scales[group];
                float& total = y[r * SIDE + o];
                total = std::fma(static_cast<float>(sum[o]), by, total);
                if constexpr (BITS == 4)
                    total = std::fma(from_bfloat16(block + 18 * SIDE + 2 * o), x.sums[group], total);
            }
        }
    }
}

#endif

// Of rows times a strip: every sum adds its products in the order of the inputs.
#if defined(__ARM_FEATURE_DOTPROD)

template <int R>
inline void meet_strip(const float* strip, int64_t inputs, const float* x, float* y) {
    // Unless all loops over sums are unrolled early, some compilers keep the sums in memory.
    float32x4_t total[4 * R];
#pragma GCC unroll 24
    for (int t = 0; t < 4 * R; ++t) total[t] = vdupq_n_f32(0);
    for (int64_t i = 0; i < inputs; ++i, strip += STRIP) {
        __builtin_prefetch(strip + STRIP_AHEAD * STRIP);
        float32x4_t w[4];
        for (int v = 0; v < 4; ++v) w[v] = vld1q_f32(strip + 4 * v);
#pragma GCC unroll 24
        for (int t = 0; t < 4 * R; ++t)
            total[t] = vfmaq_n_f32(total[t], w[t % 4], x[t / 4 * inputs + i]);
    }
#pragma GCC unroll 24
    for (int t = 0; t < 4 * R; ++t) vst1q_f32(y + 4 * t, total[t]);
}

#elif defined(__AVX512F__)

template <int R>
inline void meet_strip(const float* strip, int64_t inputs, const float* x, float* y) {
    __m512 total[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; ++i, strip += STRIP) {
        __builtin_prefetch(strip + STRIP_AHEAD * STRIP);
        const __m512 w = _mm512_loadu_ps(strip);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            total[r] = _mm512_fmadd_ps(w, _mm512_set1_ps(x[r * inputs + i]), total[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(y + r * STRIP, total[r]);
}

#elif defined(__AVX2__) && defined(__FMA__)

template <int R>
inline void meet_strip(const float* strip, int64_t inputs, const float* x, float* y) {
    __m256 total[R][2];
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm256_setzero_ps();
    for (int64_t i = 0; i < inputs; ++i, strip += STRIP) {
        const __m256 low = _mm256_loadu_ps(strip), high = _mm256_loadu_ps(strip + 8);
        for (int r = 0; r < R; ++r) {
            const __m256 some = _mm256_set1_ps(x[r * inputs + i]);
            total[r][0] = _mm256_fmadd_ps(low, some, total[r][0]);
            total[r][1] = _mm256_fmadd_ps(high, some, total[r][1]);
        }
    }
    for (int r = 0; r < R; ++r) {
        _mm256_storeu_ps(y + r * STRIP, total[r][0]);
        _mm256_storeu_ps(y + r * STRIP + 8, total[r][1]);
    }
}

#else

template <int R>
inline void meet_strip(const float* strip, int64_t inputs, const float* x, float* y) {
    for (int i = 0; i < R * STRIP; ++i) y[i] = 0;
    for (int64_t i = 0; i < inputs; ++i, strip += STRIP)
        for (int r = 0; r < R; ++r)
            for (int o = 0; o < STRIP; ++o)
                y[r * STRIP + o] = std::fma(strip[o], x[r * inputs + i], y[r * STRIP + o]);
}

#endif

// -- threads --------------------------------------------------------------------------------------

constexpr int64_t MOST_SPINS = 20000;  // some hundredths of a millisecond

// Who a thread is among those that share some work.
struct Member {
    int own = 0, threads = 1;
};
thread_local Member member;

// Where threads wait for each other, three hundred times in a forward.
class Barrier {
  public:
    void wait() {
        const int own = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == member.threads) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(own + 1, std::memory_order_release);
            return;
        }
        for (int64_t spins = 0; turn_.load(std::memory_order_acquire) == own; ++spins)
            if (spins > MOST_SPINS) std::this_thread::yield();
    }

  private:
    std::atomic<int> arrived_{0};
    std::atomic<int> turn_{0};
};

struct Share {
    int64_t first, end;

    // What one thread does of so many things.
    explicit Share(int64_t count) {
        first = count * member.own / member.threads;
        end = count * (member.own + 1) / member.threads;
    }
};

// The threads that help whoever runs a forward, of any model. OpenMP has a team for each thread
// that asks, and every model has a thread of its own: as soon as all teams together have more
// threads than there are cores, they sleep between any two forwards.
class Helpers {
  public:
    // Have so many threads do some work, or one where others are being helped.
    template <typename Work>
    void share(int64_t threads, const Work& work) {
        std::unique_lock<std::mutex> turn(busy_, std::defer_lock);
        const bool helped = threads > 1 && turn.try_lock() && hire(threads - 1);
        member = {0, helped ? static_cast<int>(threads) : 1};
        if (helped) call(threads, [](const void* it) { (*static_cast<const Work*>(it))(); }, &work);
        work();
        for (int64_t spins = 0; helped && at_work_.load(std::memory_order_acquire); ++spins)
            if (spins > MOST_SPINS) std::this_thread::yield();
    }

  private:
    static constexpr int64_t MOST = 1 << 10;  // threads
    static constexpr std::chrono::microseconds AWAKE{1000};  // for what comes after a forward

    bool hire(int64_t count) {
        try {
            for (; hired_ < std::min(count, MOST - 1); ++hired_)
                std::thread(&Helpers::help, this, hired_ + 1, call_.load()).detach();
        } catch (const std::system_error&) {
        }
        return hired_ >= count;
    }

    void call(int64_t threads, void (*run)(const void*), const void* work) {
        run_ = run;
        work_ = work;
        at_work_.store(threads - 1, std::memory_order_relaxed);
        call_.store((call_.load() / MOST + 1) * MOST + threads);
        if (!asleep_.load()) return;
        const std::lock_guard<std::mutex> lock(bed_);
        woken_.notify_all();
    }

    void help(int64_t own, int64_t heard) {
        for (;;) {
            heard = next_after(heard);
            const int64_t threads = heard % MOST;
            if (own >= threads) continue;
            member = {static_cast<int>(own), static_cast<int>(threads)};
            run_(work_);
            at_work_.fetch_sub(1, std::memory_order_release);
        }
    }

    int64_t next_after(int64_t heard) {
        const auto until = std::chrono::steady_clock::now() + AWAKE;
        for (int64_t spins = 0; call_.load() == heard; ++spins) {
            if (spins < MOST_SPINS) continue;
            if (std::chrono::steady_clock::now() > until) return sleep(heard);
            std::this_thread::yield();
        }
        return call_.load();
    }

    int64_t sleep(int64_t heard) {
        std::unique_lock<std::mutex> lock(bed_);
        ++asleep_;
        woken_.wait(lock, [&] { return call_.load() != heard; });
        --asleep_;
        return call_.load();
    }

    std::mutex busy_, bed_;
    std::condition_variable woken_;
    int64_t hired_ = 0;
    std::atomic<int64_t> call_{0};  // the number of a call, and how many threads it is for
    std::atomic<int64_t> at_work_{0}, asleep_{0};
    void (*run_)(const void*) = nullptr;
    const void* work_ = nullptr;
};

Helpers* helpers = new Helpers;  // never deleted: its threads outlive the program's end

// A process that is forked off has none of these threads.
const int forgets = pthread_atfork(nullptr, nullptr, [] { helpers = new Helpers; });

// -- products -------------------------------------------------------------------------------------

// What becomes of some rows' sums for one block of outputs: y = them, or y += them. Not inlined: there is
// a product for every number of rows, and the compiler would look at this in each.
__attribute__((noinline)) void keep_sums(const Matrix& m, const float* sums, int64_t rows, int64_t first,
                                         int64_t side, float* y, bool add) {
    const int64_t count = std::min<int64_t>(side, m.outputs - first);
    for (int64_t r = 0; r < rows; ++r) {
        float* to = y + r * m.outputs + first;
        for (int64_t o = 0; o < count; ++o) {
            const float value = sums[r * side + o] + (m.bias ? m.bias[first + o] : 0.0f);
            to[o] = add ? to[o] + value : value;
        }
    }
}

// R rows times one block of outputs (four, or a strip).
template <int BITS, int R>
inline void meet_rows(const Matrix& m, const Inputs& x, int64_t block, int64_t row, float* y,
                      bool add) {
    constexpr int side = BITS == FLOATS ? STRIP : SIDE;
    float sums[R * side];
    if constexpr (BITS == FLOATS) {
        const float* strips = reinterpret_cast<const float*>(m.blocks);
        meet_strip<R>(strips + block * m.inputs * STRIP, m.inputs, x.plain + row * m.inputs, sums);
    } else {
        const int64_t groups = m.inputs / GROUP;
        meet<BITS, R>(m.blocks + block * groups * block_bytes(BITS), groups, x, row, sums);
    }
    keep_sums(m, sums, R, block * side, side, y + row * m.outputs, add);
}

// All rows times one block. As codes they lie in eights, and then comes the rest; as they are they may
// be cut anywhere: into equal parts, so that no row comes alone.
template <int BITS, int... LESS>  // than rows, by one
void meet_all(const Matrix& m, const Inputs& x, int64_t block, float* y, bool add,
              std::integer_sequence<int, LESS...>) {
    constexpr decltype(&meet_rows<BITS, 1>) meets[] = {meet_rows<BITS, LESS + 1>...};
    constexpr int64_t most = sizeof...(LESS);
    const int64_t parts = (x.rows + most - 1) / most;
    for (int64_t part = 0, row = 0; part < parts; ++part) {
        const int64_t end = BITS == FLOATS ? x.rows * (part + 1) / parts
                                           : std::min<int64_t>(x.rows, row + most);
        meets[end - row - 1](m, x, block, row, y, add);
        row = end;
    }
}

template <int BITS>
void multiply_bits(const Matrix& m, const Inputs& x, float* y, bool add) {
    constexpr int side = BITS == FLOATS ? STRIP : SIDE;
    constexpr int most = BITS == FLOATS ? STRIP_ROWS : MOST_ROWS;
    const Share share((m.outputs + side - 1) / side);
    for (int64_t block = share.first; block < share.end; ++block)
        meet_all<BITS>(m, x, block, y, add, std::make_integer_sequence<int, most>());
}

// A thread's share of a product.
void multiply(const Matrix& m, const Inputs& x, float* y, bool add) {
    if (m.bits == FLOATS)
        multiply_bits<FLOATS>(m, x, y, add);
    else if (m.bits == 4)
        multiply_bits<4>(m, x, y, add);
    else
        multiply_bits<8>(m, x, y, add);
}

// One group of inputs as 8-bit numbers.
inline void quantise(const float* from, int64_t group, const Inputs& to) {
    int32_t bits = 0;  // of a size: they have the order of sizes, and what is no number is above all
    for (int i = 0; i < GROUP; ++i) {
        int32_t own;
        std::memcpy(&own, from + i, 4);
        bits = std::max(bits, own & 0x7fffffff);
    }
    float most;
    std::memcpy(&most, &bits, 4);
    const float back = most > 0 ? 127.0f / most : 0.0f;
    int8_t* codes = to.codes + group * GROUP;
    int32_t sum = 0;
    for (int i = 0; i < GROUP; ++i) {
        const int32_t code = static_cast<int32_t>(std::nearbyint(from[i] * back));
        codes[i] = static_cast<int8_t>(code);
        sum += code;
    }
    const float scale = most / 127.0f;
    to.scales[group] = scale;
    to.sums[group] = scale * static_cast<float>(sum);
    to.wholes[group] = sum;
}

inline void put(const float* from, int64_t row, int64_t group, const Inputs& to) {
    if (to.plain)
        std::memcpy(to.plain + (row * to.groups + group) * GROUP, from, GROUP * sizeof(float));
    else
        quantise(from, to.at(row, group), to);
}

// -- what is around them --------------------------------------------------------------------------

// e to the x, as good as float32 is.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float t = x * 1.44269504088896341f + 0.5f;
    int32_t floor = static_cast<int32_t>(t);
    floor -= static_cast<float>(floor) > t;
    const float whole = static_cast<float>(floor);
    const float r = std::fma(whole, -0.693145751953125f, x);
    const float s = std::fma(whole, -1.42860682030941723e-6f, r);
    float p = 1.9875691500e-4f;
    p = std::fma(p, s, 1.3981999507e-3f);
    p = std::fma(p, s, 8.3334519073e-3f);
    p = std::fma(p, s, 4.1665795894e-2f);
    p = std::fma(p, s, 1.6666665459e-1f);
    p = std::fma(p, s, 5.0000001201e-1f);
    p = std::fma(p, s * s, s + 1.0f);
    const int32_t bits = (floor + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

// Some numbers at a time: a compiler makes of them what its processor has.
typedef float Four __attribute__((vector_size(16)));
typedef float Sixteen __attribute__((vector_size(64)));

template <typename Some>
inline Some load(const float* from) {
    Some found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

// Every fourth of them, added up.
inline Four in_four(const Sixteen& all) {
    const float* at = reinterpret_cast<const float*>(&all);
    return (load<Four>(at) + load<Four>(at + 4)) + (load<Four>(at + 8) + load<Four>(at + 12));
}

inline float added(const Four& all) { return (all[0] + all[1]) + (all[2] + all[3]); }

// The first and third of two fours and the second and fourth, added.
inline Four added_in_pairs(const Four& a, const Four& b) {
    return Four{a[0], a[2], b[0], b[2]} + Four{a[1], a[3], b[1], b[3]};
}

// Of a multiple of four numbers. The last, if they are no sixteen, are as if zeros were behind them.
inline float dot(const float* a, const float* b, int64_t size) {
    Sixteen all = {};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) all += load<Sixteen>(a + i) * load<Sixteen>(b + i);
    if (i == size) return added(in_four(all));
    Sixteen rest_a = {}, rest_b = {};
    std::memcpy(&rest_a, a + i, (size - i) * sizeof(float));
    std::memcpy(&rest_b, b + i, (size - i) * sizeof(float));
    return added(in_four(all + rest_a * rest_b));
}

inline float length(const float* x, int64_t size, double eps) {
    return std::sqrt(dot(x, x, size) / static_cast<float>(size) + static_cast<float>(eps));
}

// Rows, normed: a thread's share of their groups.
void norm_rows(const float* x, const float* weight, double eps, const Inputs& to) {
    const int64_t groups = to.groups, size = groups * GROUP;
    const Share share(to.rows * groups);
    int64_t row = -1;
    float back = 0;
    for (int64_t item = share.first; item < share.end; ++item) {
        if (item / groups != row) {
            row = item / groups;
            back = 1.0f / length(x + row * size, size, eps);
        }
        const int64_t first = item % groups * GROUP;
        float some[GROUP];
        for (int i = 0; i < GROUP; ++i)
            some[i] = x[row * size + first + i] * back * weight[first + i];
        put(some, row, item % groups, to);
    }
}

void put_rows(const float* x, const Inputs& to) {
    const Share share(to.rows * to.groups);
    for (int64_t item = share.first; item < share.end; ++item)
        put(x + item * GROUP, item / to.groups, item % to.groups, to);
}

// silu(gate) * up
void gate_rows(const float* gate_up, const Inputs& to) {
    const int64_t groups = to.groups, size = groups * GROUP;
    const Share share(to.rows * groups);
    for (int64_t item = share.first; item < share.end; ++item) {
        const float* gate = gate_up + item / groups * 2 * size + item % groups * GROUP;
        float some[GROUP];
        for (int i = 0; i < GROUP; ++i)
            some[i] = gate[i] / (1.0f + exponential(-gate[i])) * gate[size + i];
        put(some, item / groups, item % groups, to);
    }
}

// The two numbers of a pair are turned together.
inline void turn(const float* from, const float* turns, const float* norm, int64_t size,
                 double eps, float* to) {
    const float back = norm ? 1.0f / length(from, size, eps) : 1.0f;
    for (int64_t i = 0; i < size; i += 2) {
        const float a = norm ? from[i] * back * norm[i] : from[i];
        const float b = norm ? from[i + 1] * back * norm[i + 1] : from[i + 1];
        to[i] = a * turns[i] - b * turns[i + 1];
        to[i + 1] = a * turns[i + 1] + b * turns[i];
    }
}

// Turn queries where they are, and write keys and values to where they live.
void turn_and_keep(const Model& model, const Layer& layer, const Rows& rows, float* kept,
                   float* qkv) {
    const int64_t size = model.head_dim, all = model.heads + 2 * model.key_heads;
    const Share share(rows.rows * all);
    for (int64_t item = share.first; item < share.end; ++item) {
        const int64_t row = item / all, head = item % all;
        float* from = qkv + item * size;
        const float* turns = model.turns + rows.positions[row] * size;
        float* slot = kept + rows.slots[row] * 2 * model.key_heads * size;
        float* to = slot + (head - model.heads) * size;
        if (head < model.heads)
            turn(from, turns, layer.q_norm, size, model.eps, from);
        else if (head < model.heads + model.key_heads)
            turn(from, turns, layer.k_norm, size, model.eps, to);
        else
            std::memcpy(to, from, size * sizeof(float));
    }
}

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

// Products of a query and a key, as many sums as there are lanes.
template <int D>
inline Sixteen products(const float* q, const float* key) {
    Sixteen all = {};
    for (int i = 0; i < D; i += 16) all += load<Sixteen>(q + i) * load<Sixteen>(key + i);
    return all;
}

#if defined(__AVX512F__)

// What `in_four` makes of four of them, in the order of the keys.
inline __m512 four_in_four(const Sixteen* all) {
    const auto halved = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    };
    const auto of = [&](int k) { return reinterpret_cast<__m512>(all[k]); };
    return halved(halved(of(0), of(1)), halved(of(2), of(3)));
}

// Scores of sixteen keys: the same sums, with fewer moves within registers.
template <int D>
inline void score_sixteen(const float* q, const float* keys, int64_t step, float scale,
                          float* scores) {
    const auto in_pairs = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    };
    __m512 fours[4];
#pragma GCC unroll 4
    for (int f = 0; f < 4; ++f) {
        Sixteen all[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) all[k] = products<D>(q, keys + (4 * f + k) * step);
        fours[f] = four_in_four(all);
    }
    const __m512 found = in_pairs(in_pairs(fours[0], fours[1]), in_pairs(fours[2], fours[3]));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 scaled = _mm512_mul_ps(found, _mm512_set1_ps(scale));
    _mm512_storeu_ps(scores, _mm512_permutexvar_ps(order, scaled));
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

inline float largest(const float* x, int64_t count) {
    float most = -INFINITY;
    int64_t s = 0;
    if (count >= 16) {
        Sixteen all = load<Sixteen>(x);
        for (s = 16; s + 16 <= count; s += 16) {
            const Sixteen some = load<Sixteen>(x + s);
            all = some > all ? some : all;
        }
        for (int i = 0; i < 16; ++i) most = std::max(most, all[i]);
    }
    for (; s < count; ++s) most = std::max(most, x[s]);
    return most;
}

// Scores to shares of a whole that is returned. Sums are of every sixteenth.
__attribute__((noinline)) float share_out(float* scores, int64_t count) {
    const float most = largest(scores, count);
    for (int64_t s = 0; s < count; ++s) scores[s] = exponential(scores[s] - most);
    Sixteen mass = {};
    int64_t s = 0;
    for (; s + 16 <= count; s += 16) mass += load<Sixteen>(scores + s);
    Sixteen rest = {};
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
using Sums = std::conditional_t<(D > 0), Sixteen, Four>[(D ? D : MOST_HEAD) / (D ? 16 : 4)];

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
                 float* scores, int64_t slots, float* out) {
    constexpr int most = D ? std::min(MOST_TOGETHER, std::max(1, SEEN_AT_ONCE / D)) : 1;
    const int64_t size = model.head_dim, all = model.heads + 2 * model.key_heads;
    const int64_t fold = model.heads / model.key_heads, beside = rows.rows * fold;
    const Share share(rows.rows * model.heads);
    for (int64_t item = share.first; item < share.end;) {
        const int64_t key_head = item / beside, lane = rows.lanes[item % beside / fold];
        const float* keys = kept + key_head * size;
        const float* values = keys + model.key_heads * size;
        const Seen seen = {lane, keys, values, 2 * model.key_heads * size, size};
        Query query[most];
        int count = 0;
        for (; count < most && item < share.end && item / beside == key_head; ++count, ++item) {
            const int64_t row = item % beside / fold, head = key_head * fold + item % fold;
            if (rows.lanes[row] != lane) break;
            const int64_t near = rows.horizon[row], lo = std::max<int64_t>(rows.lo[row], near);
            query[count] = {qkv + (row * all + head) * size, scores + count * slots,
                            out + (row * model.heads + head) * size, near, lo, rows.hi[row]};
        }
        attend_together<D>(rows, seen, query, count, std::make_integer_sequence<int, most>());
    }
}

void attend(const Model& model, const Rows& rows, const float* kept, const float* qkv,
            float* scores, int64_t slots, float* out) {
    const auto run = model.head_dim == 32    ? attend_with<32>
                     : model.head_dim == 64  ? attend_with<64>
                     : model.head_dim == 128 ? attend_with<128>
                                             : attend_with<0>;
    run(model, rows, kept, qkv, scores, slots, out);
}

// The inputs of a matrix, in so much memory as they take as floats.
Inputs inputs_of(const Matrix& m, float* memory, int64_t rows) {
    const int64_t groups = m.inputs / GROUP, all = rows * groups;
    if (m.bits == FLOATS) return {memory, nullptr, nullptr, nullptr, nullptr, rows, groups};
    int32_t* wholes = reinterpret_cast<int32_t*>(memory + 2 * all);
    int8_t* codes = reinterpret_cast<int8_t*>(memory + 3 * all);
    return {nullptr, codes, memory, memory + all, wholes, rows, groups};
}

// Where a forward keeps what is in between. Some of it is read more often than there are rows.
struct Memory {
    int64_t qkv, seen, inputs, scores, end;

    Memory(const Model& m, int64_t rows, int64_t slots, int64_t threads) {
        const int64_t heads = m.heads * m.head_dim, all = heads + 2 * m.key_heads * m.head_dim;
        qkv = rows * m.hidden;
        seen = qkv + rows * all;
        inputs = qkv + rows * std::max(all + std::max(heads, m.hidden), 2 * m.inner);
        scores = inputs + rows * std::max({m.hidden, m.inner, heads});
        end = scores + threads * slots * MOST_TOGETHER;
    }
};

// The largest of some numbers, as `largest` says; NAN if one is none.
inline float largest_or_none(const float* x, int64_t count) {
    int32_t none = 0;
    for (int64_t i = 0; i < count; ++i) none |= x[i] != x[i];
    return none ? NAN : largest(x, count);
}

// The first of the likeliest; -1 where nothing is possible, or something is no number.
int64_t likeliest(const float* logits, int64_t count) {
    constexpr int64_t some = 512;
    float most = -INFINITY;
    int64_t place = -1;
    for (int64_t i = 0; i < count; i += some) {
        const float own = largest_or_none(logits + i, std::min(some, count - i));
        if (own != own) return -1;
        if (own <= most) continue;
        most = own;
        place = i;
    }
    return place < 0 ? -1 : std::find(logits + place, logits + count, most) - logits;
}

bool has_ended(const Texts& texts, int64_t text, int64_t written, int64_t token) {
    const int64_t first = text ? texts.ends_until[text - 1] : 0;
    const int64_t* end = texts.ends + texts.ends_until[text];
    return written >= texts.wanted[text] || std::find(texts.ends + first, end, token) != end;
}

// Give a row its next token, and the place for it.
void move_on(const Texts& texts, const Rows& rows, int64_t text, int64_t token, int64_t steps) {
    const int64_t place = texts.positions[text] += steps;
    const int64_t page = rows.lanes[text] * rows.pages_per_lane + place / rows.page_size;
    texts.tokens[text] = std::max<int64_t>(token, 0);
    texts.slots[text] = rows.pages[page] + place % rows.page_size;
    texts.horizon[text] += static_cast<int32_t>(steps);
}

}  // namespace

extern "C" void forward(const Model* model, const Rows* given, int64_t slots);

namespace {

// The rows of a forward, text by text.
struct Laid {
    std::vector<int64_t> tokens, positions, slots, lanes, read;
    std::vector<int32_t> horizon, lo, hi;
    const Runner& of;

    explicit Laid(const Runner& runner) : of(runner) {
        for (auto* numbers : {&tokens, &positions, &slots, &lanes, &read})
            numbers->reserve(runner.most_rows);
        for (auto* numbers : {&horizon, &lo, &hi}) numbers->reserve(runner.most_rows);
    }

    void clear() {
        for (auto* numbers : {&tokens, &positions, &slots, &lanes, &read}) numbers->clear();
        for (auto* numbers : {&horizon, &lo, &hi}) numbers->clear();
    }

    // Tokens [first, end) of a text; those from `first_read` on are read.
    void add(int64_t lane, const int32_t* text, int64_t first, int64_t end, int64_t first_read) {
        for (int64_t place = first; place < end; ++place) {
            if (place >= first_read) read.push_back(tokens.size());
            add_row(lane, text[place], place);
            horizon.push_back(static_cast<int32_t>(place + 1));
            lo.push_back(0);
            hi.push_back(0);
        }
        of.looked_at[0] += (end - first) * end;
        of.looked_at[1] += end;
    }

    // So many masks behind the rows of a text: they see it and each other. The first are read.
    void add_masks(int64_t lane, int64_t mask, int64_t first, int64_t length, int64_t count,
                   int64_t reads) {
        const int64_t end = length + count;
        for (int64_t place = length; place < end; ++place) {
            if (place < length + reads) read.push_back(tokens.size());
            add_row(lane, mask, place);
            horizon.push_back(static_cast<int32_t>(length));
            lo.push_back(static_cast<int32_t>(length));
            hi.push_back(static_cast<int32_t>(end));
        }
        of.looked_at[0] += count * (end + length - first);
        of.looked_at[1] += count;
    }

    void add_row(int64_t lane, int64_t token, int64_t place) {
        const Rows& rows = *of.rows;
        tokens.push_back(token);
        positions.push_back(place);
        const int64_t page = rows.pages[lane * rows.pages_per_lane + place / rows.page_size];
        slots.push_back(page + place % rows.page_size);
        lanes.push_back(lane);
    }
};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Where a text's last tokens stood last before: how many tokens were drafted from there.
int64_t copy_on(int32_t* text, int64_t length, int64_t run, int64_t most) {
    for (int64_t n = std::min(run, length - 1); n > 0; --n) {
        const int32_t* last = text + length - n;
        for (int64_t start = length - n - 1; start >= 0; --start) {
            if (!std::equal(last, last + n, text + start)) continue;
            // what reaches the end of the text goes on with what it has copied
            for (int64_t i = 0; i < most; ++i) text[length + i] = text[start + n + i];
            return most;
        }
    }
    return 0;
}

// One launch: what the texts have come to.
struct Launch {
    Rounds& all;
    std::vector<int64_t> wished, drafted, accepted, token;
    std::vector<bool> over;

    explicit Launch(Rounds& rounds)
        : all(rounds), wished(rounds.texts), drafted(rounds.texts), accepted(rounds.texts),
          token(rounds.texts), over(rounds.texts, false) {}

    int32_t* text(int64_t i) const { return all.tokens + i * all.pitch; }

    bool ends(int64_t i, int64_t with) const {
        const int64_t* end = all.ends + all.ends_until[i];
        return std::find(all.ends + (i ? all.ends_until[i - 1] : 0), end, with) != end;
    }

    // How many tokens each may draft. Is there room for them?
    bool wish() {
        for (int64_t i = 0; i < all.texts; ++i) {
            if (over[i]) continue;
            wished[i] = std::min(all.most[i], all.wanted[i] - all.length[i] - 1);
            if (all.run[i] && all.reach[i] >= 0) wished[i] = std::min(wished[i], all.reach[i]);
            if (all.length[i] + wished[i] > all.room[i]) return false;
        }
        return true;
    }

    void draft_copies() {
        for (int64_t i = 0; i < all.texts; ++i) {
            drafted[i] = 0;
            if (over[i] || !all.run[i]) continue;
            const int64_t count = copy_on(text(i), all.length[i], all.run[i], wished[i]);
            while (drafted[i] < count && !ends(i, text(i)[all.length[i] + drafted[i]++])) {
            }
        }
    }

    bool drafts_by_model(int64_t i) const { return !over[i] && !all.run[i] && wished[i]; }

    // Fill blanks behind the texts, all of a text at once. Is every drafted token possible?
    bool fill_blanks(Laid& laid) {
        laid.clear();
        for (int64_t i = 0; i < all.texts; ++i) {
            if (!drafts_by_model(i) || all.mask[i] < 0) continue;
            const int64_t lane = all.lanes[i], held = all.held[i], length = all.length[i];
            laid.add(lane, text(i), held, length, length - all.shifted[i]);
            laid.add_masks(lane, all.mask[i], held, length, wished[i], wished[i] - all.shifted[i]);
        }
        if (laid.tokens.empty()) return true;
        run(laid);
        const float* logits = laid.of.rows->logits;
        for (int64_t i = 0; i < all.texts; ++i) {
            if (!drafts_by_model(i) || all.mask[i] < 0) continue;
            all.held[i] = all.length[i];
            bool at_end = false;
            for (int64_t k = 0; k < wished[i]; ++k, logits += all.vocab) {
                const int64_t found = likeliest(logits, all.vocab);
                if (found < 0) return false;
                if (at_end) continue;
                text(i)[all.length[i] + drafted[i]++] = static_cast<int32_t>(found);
                at_end = ends(i, found);
            }
        }
        return true;
    }

    // Token after token. Is every drafted token possible?
    bool draft_by(Laid& laid) {
        std::vector<int64_t> asked, next;
        laid.clear();
        for (int64_t i = 0; i < all.texts; ++i) {
            if (!drafts_by_model(i) || all.mask[i] >= 0) continue;
            asked.push_back(i);
            laid.add(all.lanes[i], text(i), all.held[i], all.length[i], all.length[i] - 1);
        }
        while (!asked.empty()) {
            run(laid);
            laid.clear();
            next.clear();
            const float* logits = laid.of.rows->logits;
            for (const int64_t i : asked) {
                const int64_t found = likeliest(logits, all.vocab);
                logits += all.vocab;
                if (found < 0) return false;
                const int64_t place = all.length[i] + drafted[i]++;
                text(i)[place] = static_cast<int32_t>(found);
                if (drafted[i] == wished[i] || ends(i, found)) continue;
                next.push_back(i);
                laid.add(all.lanes[i], text(i), place, place + 1, place);
            }
            asked.swap(next);
        }
        return true;
    }

    // Is every token behind what is accepted possible?
    bool judge(Laid& laid) {
        laid.clear();
        for (int64_t i = 0; i < all.texts; ++i) {
            if (over[i]) continue;
            const int64_t last = all.length[i] - 1;
            laid.add(all.lanes[i], text(i), last, last + 1 + drafted[i], last);
        }
        run(laid);
        const float* logits = laid.of.rows->logits;
        for (int64_t i = 0; i < all.texts; ++i) {
            if (over[i]) continue;
            const int32_t* draft = text(i) + all.length[i];
            int64_t n = 0;
            while (true) {
                token[i] = likeliest(logits + n * all.vocab, all.vocab);
                if (token[i] < 0) return false;
                if (n == drafted[i] || token[i] != draft[n]) break;
                ++n;
            }
            accepted[i] = n;
            logits += (1 + drafted[i]) * all.vocab;
        }
        return true;
    }

    void note(int64_t round) {
        for (int64_t i = 0; i < all.texts; ++i) {
            int64_t* found = all.found + (round * all.texts + i) * (3 + all.longest);
            found[0] = over[i] ? -1 : drafted[i];
            found[1] = accepted[i];
            found[2] = token[i];
            if (!over[i]) std::copy_n(text(i) + all.length[i], drafted[i], found + 3);
        }
    }

    // Give the texts what they have got. Has one of them ended? Have all?
    void move_on(bool& one_ended, bool& all_ended) {
        all_ended = true;
        for (int64_t i = 0; i < all.texts; ++i) {
            if (over[i]) continue;
            const int64_t n = accepted[i];
            int32_t* draft = text(i) + all.length[i];
            if (drafted[i] && all.reach[i] >= 0) all.reach[i] = 2 * n + 1;
            if (drafted[i] && !all.run[i] && all.mask[i] < 0)
                all.held[i] = all.length[i] + std::min(n, drafted[i] - 1);
            const bool accepted_end = n && ends(i, draft[n - 1]);
            draft[n] = static_cast<int32_t>(token[i]);
            all.length[i] += n + 1;
            over[i] = accepted_end || ends(i, token[i]) || all.length[i] >= all.wanted[i];
            one_ended = one_ended || over[i];
            all_ended = all_ended && over[i];
        }
    }

    void run(Laid& laid) {
        const Runner& of = laid.of;
        const int64_t count = laid.tokens.size();
        Rows rows = *of.rows;
        rows.rows = count;
        rows.reads = laid.read.size();
        rows.threads = of.threads[count];
        rows.tokens = laid.tokens.data();
        rows.positions = laid.positions.data();
        rows.slots = laid.slots.data();
        rows.lanes = laid.lanes.data();
        rows.horizon = laid.horizon.data();
        rows.lo = laid.lo.data();
        rows.hi = laid.hi.data();
        rows.read = laid.read.data();
        const Clock::time_point begin = Clock::now();
        forward(of.model, &rows, of.slots);
        of.seconds[count] += seconds_since(begin);
        ++of.forwards[count];
        for (int64_t row = 0; row < rows.reads; ++row)
            for (int64_t i = 0; i < of.impossible_count; ++i)
                rows.logits[row * all.vocab + of.impossible[i]] = -INFINITY;
    }
};

}  // namespace

extern "C" {

// Is there code for this processor? Plain code is right everywhere, but slow.
int64_t is_fast() {
#if defined(__ARM_FEATURE_DOTPROD) || (defined(__AVX2__) && defined(__FMA__))
    return 1;
#else
    return 0;
#endif
}

// How many outputs a block has.
int64_t side() { return SIDE; }

// Numbers of `memory` that a forward needs: of so many rows, or of so many that are read, whichever
// are more, each of which sees so many slots at most.
int64_t forward_memory(const Model* model, int64_t rows, int64_t slots, int64_t threads) {
    return Memory(*model, rows, slots, threads).end;
}

void forward(const Model* model, const Rows* given, int64_t slots) {
    const Model& m = *model;
    const Rows& rows = *given;
    const int64_t most = std::max(rows.rows, rows.reads);
    const Memory at(m, most, slots, rows.threads);
    float* x = rows.memory;
    float* qkv = x + at.qkv;
    float* seen = x + at.seen;
    float* gate_up = qkv;
    float* inputs = x + at.inputs;
    Barrier barrier;
    helpers->share(rows.threads, [&] {
        const auto wait = [&] { barrier.wait(); };
        float* scores = x + at.scores + member.own * slots * MOST_TOGETHER;
        int64_t count = rows.rows;
        const auto keep_those_read = [&] {
            if (member.own == 0) {
                for (int64_t i = 0; i < rows.reads; ++i)
                    std::memcpy(seen + i * m.hidden, x + rows.read[i] * m.hidden,
                                m.hidden * sizeof(float));
                std::memcpy(x, seen, rows.reads * m.hidden * sizeof(float));
            }
            count = rows.reads;
            wait();
        };
        const Share own(rows.rows);
        for (int64_t row = own.first; row < own.end; ++row)
            std::memcpy(x + row * m.hidden, m.embed + rows.tokens[row] * m.hidden,
                        m.hidden * sizeof(float));
        for (int64_t index = 0; index < m.layers; ++index) {
            const Layer& layer = m.layer[index];
            float* features = rows.features[index];
            const Inputs of_qkv = inputs_of(layer.qkv, inputs, count);
            const Inputs of_out = inputs_of(layer.out, inputs, count);
            wait();
            norm_rows(x, layer.norm_attn, m.eps, of_qkv);
            wait();
            multiply(layer.qkv, of_qkv, qkv, false);
            wait();
            turn_and_keep(m, layer, rows, rows.kept[index], qkv);
            wait();
            attend(m, rows, rows.kept[index], qkv, scores, slots, seen);
            wait();
            put_rows(seen, of_out);
            wait();
            multiply(layer.out, of_out, x, true);
            wait();
            // past the last keys and values only the rows that are read matter
            if (index == m.layers - 1 && !features) keep_those_read();
            const Inputs of_gate_up = inputs_of(layer.gate_up, inputs, count);
            const Inputs of_down = inputs_of(layer.down, inputs, count);
            norm_rows(x, layer.norm_mlp, m.eps, of_gate_up);
            wait();
            multiply(layer.gate_up, of_gate_up, gate_up, false);
            wait();
            gate_rows(gate_up, of_down);
            wait();
            multiply(layer.down, of_down, x, true);
            if (features) {
                wait();
                for (int64_t row = own.first; row < own.end; ++row)
                    std::memcpy(features + rows.slots[row] * m.hidden, x + row * m.hidden,
                                m.hidden * sizeof(float));
            }
        }
        wait();
        if (rows.features[m.layers - 1]) keep_those_read();
        const Inputs of_head = inputs_of(m.head, inputs, rows.reads);
        norm_rows(x, m.norm, m.eps, of_head);
        wait();
        multiply(m.head, of_head, rows.logits, false);
    });
}

// Write on until all texts have ended. How many tokens each has then.
int64_t write_on(const Model* model, Rows* rows, Texts* given, int64_t slots) {
    Texts& texts = *given;
    const int64_t count = rows->rows, size = count * texts.vocab;
    int64_t running = count;
    std::vector<bool> over(count, false);
    float* logits = texts.logits;
    for (int64_t step = 0;; ++step) {
        for (int64_t text = 0; text < count; ++text) {
            const int64_t token = likeliest(logits + text * texts.vocab, texts.vocab);
            texts.drawn[step * count + text] = token;
            if (!over[text] && has_ended(texts, text, step + 1, token)) {
                over[text] = true;
                --running;
            }
        }
        if (!running || step + 1 == texts.steps) return step + 1;
        if (texts.stop && *texts.stop) return step + 1;
        for (int64_t text = 0; text < count; ++text)
            move_on(texts, *rows, text, texts.drawn[step * count + text], step > 0);
        if (texts.keeps) logits += size;
        rows->logits = logits;
        forward(model, rows, slots);
        for (int64_t text = 0; text < count; ++text)
            for (int64_t i = 0; i < texts.impossible_count; ++i)
                logits[text * texts.vocab + texts.impossible[i]] = -INFINITY;
    }
}

// Draft and judge until all texts have ended. How many rounds that took.
int64_t go_on(const Runner* target, const Runner* drafter, Rounds* given) {
    Rounds& all = *given;
    Launch launch(all);
    Laid judged(*target), drafts(drafter ? *drafter : *target);
    const Clock::time_point begin = Clock::now();
    double before = 0, longest = 0;
    bool one_ended = false, all_ended = false;
    for (int64_t round = 0; round < all.rounds; ++round) {
        if (*all.stop || before + longest > all.seconds || !launch.wish()) return round;
        launch.draft_copies();
        if (drafter && !(launch.fill_blanks(drafts) && launch.draft_by(drafts))) return round;
        if (!launch.judge(judged)) return round;
        launch.note(round);
        launch.move_on(one_ended, all_ended);
        if (all_ended || (one_ended && all.first_ends)) return round + 1;
        const double now = seconds_since(begin);
        longest = std::max(longest, now - before);
        before = now;
    }
    return all.rounds;
}

// The product of rows. `memory` has room for rows * inputs numbers.
void product(const Matrix* matrix, const float* x, int64_t rows, float* memory, int64_t threads,
             float* y) {
    const Inputs inputs = inputs_of(*matrix, memory, rows);
    Barrier barrier;
    helpers->share(threads, [&] {
        put_rows(x, inputs);
        barrier.wait();
        multiply(*matrix, inputs, y, false);
    });
}

}  // extern "C"
