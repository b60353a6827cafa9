// Products of a matrix and rows, with code for several processors.

#include "model.h"

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

// Have something in a register from here on. Some compilers would add up products only once they have made
// all of them, and load weights again for every row.
#if defined(__AVX512F__)
#define MADE_HERE(it) asm("" : "+v"(it))
#else
#define MADE_HERE(it) asm("" : "+x"(it))
#endif

namespace forerun {
namespace {

#if defined(__AVX512F__)
constexpr int STRIP_ROWS = 16;  // rows that meet a strip at once: their sums stay in registers
#else
constexpr int STRIP_ROWS = 6;
#endif
constexpr int BLOCK_AHEAD = 2048;  // bytes: a block is loaded so far before it is met
constexpr int STRIP_AHEAD = 48;  // inputs: a strip is loaded so far before it is met

// -- one block against some rows ------------------------------------------------------------------

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
        if constexpr (BITS == 4) {
            sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, some));
        } else {
            some = _mm512_mask_sub_epi8(some, negative, _mm512_setzero_si512(), some);
            const __m512i pairs = _mm512_maddubs_epi16(w, some);
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
        }
        MADE_HERE(sum);
        return sum;
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

// Products of eight outputs' weights, four inputs of each, with four codes of a row, added to sums of
// whole numbers: of 16 bits where all sixteen of a group, of 4 bits by 8, have room in them, else of 32.
template <int BITS>
inline __m256i add_products(__m256i sum, __m256i w, const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    const __m256i some = _mm256_set1_epi32(four);
    if constexpr (BITS == 4) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, some));
    } else {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(some, w));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    MADE_HERE(sum);
    return sum;
}

// Sums of a group, 8 outputs at a time, in registers for all rows at once.
template <int BITS, int R>
inline void meet(const uint8_t* block, int64_t groups, const Inputs& x, int64_t row, float* y) {
    __m256 total[R];
    for (int r = 0; r < R; ++r) total[r] = _mm256_setzero_ps();
    const int8_t* codes = x.codes + row * groups * GROUP;
    const float* scales = x.scales + row * groups;
    [[maybe_unused]] const float* sums = x.sums + row * groups;
    const auto eight_bfloat16 = [](const uint8_t* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    };
    for (int64_t g = 0; g < groups; ++g, block += block_bytes(BITS)) {
        const __m256i* lines = reinterpret_cast<const __m256i*>(block);
        for (int64_t line = 0; line < block_bytes(BITS); line += 64)
            __builtin_prefetch(block + BLOCK_AHEAD + line);
        __m256i whole[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) whole[r] = _mm256_setzero_si256();
        const auto add = [&](__m256i w, int64_t at) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                whole[r] = add_products<BITS>(whole[r], w, codes + (g * R + r) * GROUP + at);
        };
#pragma GCC unroll 8
        for (int j = 0; j < BITS; ++j) {
            const __m256i line = _mm256_loadu_si256(lines + j);
            if constexpr (BITS == 4) {
                const __m256i low = _mm256_set1_epi8(15);
                add(_mm256_and_si256(line, low), 4 * j);
                add(_mm256_and_si256(_mm256_srli_epi16(line, 4), low), 16 + 4 * j);
            } else {
                add(line, 4 * j);
            }
        }
        const __m256 scale = eight_bfloat16(block + 4 * BITS * SIDE);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            if constexpr (BITS == 4)
                whole[r] = _mm256_madd_epi16(whole[r], _mm256_set1_epi16(1));
            const __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(scales[g * R + r]));
            total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r]), by, total[r]);
        }
        if constexpr (BITS == 4) {
            const __m256 offset = eight_bfloat16(block + 18 * SIDE);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                total[r] = _mm256_fmadd_ps(offset, _mm256_set1_ps(sums[g * R + r]), total[r]);
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
        __builtin_prefetch(strip + STRIP_AHEAD * STRIP);
        __m256 low = _mm256_loadu_ps(strip), high = _mm256_loadu_ps(strip + 8);
        MADE_HERE(low);
        MADE_HERE(high);
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

// -- all blocks against all rows ------------------------------------------------------------------

// What becomes of some rows' sums for one block of outputs: y = them, or y += them. Not inlined: there is
// a product for every number of rows, and the compiler would look at this in each. What does not change
// is asked outside of the loops over outputs: it would not be moved there.
__attribute__((noinline)) void keep_sums(const Matrix& m, float* sums, int64_t rows, int64_t first,
                                         int64_t side, float* y, bool add) {
    const int64_t count = std::min<int64_t>(side, m.outputs - first);
    const float* bias = m.bias ? m.bias + first : nullptr;
    for (int64_t r = 0; r < rows; ++r, sums += side) {
        float* to = y + r * m.outputs + first;
        if (bias)
            for (int64_t o = 0; o < count; ++o) sums[o] += bias[o];
        if (add)
            for (int64_t o = 0; o < count; ++o) to[o] += sums[o];
        else
            std::memcpy(to, sums, count * sizeof(float));
    }
}

// R rows times one block of outputs (SIDE of a quantised matrix, or a strip).
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
void multiply_bits(const Matrix& m, const Inputs& x, int64_t part, int64_t parts, float* y, bool add) {
    constexpr int side = BITS == FLOATS ? STRIP : SIDE;
    constexpr int most = BITS == FLOATS ? STRIP_ROWS : MOST_ROWS;
    const int64_t blocks = (m.outputs + side - 1) / side;
    for (int64_t block = blocks * part / parts; block < blocks * (part + 1) / parts; ++block)
        meet_all<BITS>(m, x, block, y, add, std::make_integer_sequence<int, most>());
}

}  // namespace

void multiply(const Matrix& m, const Inputs& x, int64_t part, int64_t parts, float* y, bool add) {
    const auto run = m.bits == FLOATS ? multiply_bits<FLOATS>
                     : m.bits == 4    ? multiply_bits<4>
                                      : multiply_bits<8>;
    run(m, x, part, parts, y, add);
}

}  // namespace forerun
