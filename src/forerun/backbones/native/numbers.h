// Some numbers at a time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace forerun {
namespace {

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
typedef float Eight __attribute__((vector_size(32)));
typedef float Sixteen __attribute__((vector_size(64)));

// As many as a register has. What no register has many compilers keep in memory.
#if defined(__AVX512F__)
using Lanes = Sixteen;
#elif defined(__AVX2__)
using Lanes = Eight;
#else
using Lanes = Four;
#endif
constexpr int64_t LANES = sizeof(Lanes) / sizeof(float);

// Twice as many numbers, for sums.
template <typename Half>
struct Pair {
    Half low, high;

    Pair operator+(const Pair& other) const { return {low + other.low, high + other.high}; }
    Pair operator*(const Pair& other) const { return {low * other.low, high * other.high}; }
    Pair& operator+=(const Pair& other) { return *this = *this + other; }
};

// Sixteen numbers in registers.
using Wide = std::conditional_t<
    LANES == 16, Sixteen, std::conditional_t<LANES == 8, Pair<Eight>, Pair<Pair<Four>>>>;

template <typename Some>
struct Load {
    static Some from(const float* at) {
        Some found;
        std::memcpy(&found, at, sizeof found);
        return found;
    }
};

template <typename Half>
struct Load<Pair<Half>> {
    static Pair<Half> from(const float* at) {
        return {Load<Half>::from(at), Load<Half>::from(at + sizeof(Half) / sizeof(float))};
    }
};

template <typename Some>
inline Some load(const float* from) {
    return Load<Some>::from(from);
}

// Every fourth of them, added up.
inline Four in_four(const Four& all) { return all; }

inline Four in_four(const Eight& all) {
    const float* at = reinterpret_cast<const float*>(&all);
    return load<Four>(at) + load<Four>(at + 4);
}

inline Four in_four(const Sixteen& all) {
    const float* at = reinterpret_cast<const float*>(&all);
    return in_four(load<Eight>(at)) + in_four(load<Eight>(at + 8));
}

template <typename Half>
inline Four in_four(const Pair<Half>& all) {
    return in_four(all.low) + in_four(all.high);
}

inline float added(const Four& all) { return (all[0] + all[1]) + (all[2] + all[3]); }

// The first and third of two fours and the second and fourth, added.
inline Four added_in_pairs(const Four& a, const Four& b) {
    return Four{a[0], a[2], b[0], b[2]} + Four{a[1], a[3], b[1], b[3]};
}

// Of a multiple of four numbers. The last, if they are no sixteen, are as if zeros were behind them.
inline float dot(const float* a, const float* b, int64_t size) {
    Wide all = {};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) all += load<Wide>(a + i) * load<Wide>(b + i);
    if (i == size) return added(in_four(all));
    Wide rest_a = {}, rest_b = {};
    std::memcpy(&rest_a, a + i, (size - i) * sizeof(float));
    std::memcpy(&rest_b, b + i, (size - i) * sizeof(float));
    return added(in_four(all + rest_a * rest_b));
}

inline float largest(const float* x, int64_t count) {
    float most = -INFINITY;
    int64_t s = 0;
    if (count >= LANES) {
        Lanes all = load<Lanes>(x);
        for (s = LANES; s + LANES <= count; s += LANES) {
            const Lanes some = load<Lanes>(x + s);
            all = some > all ? some : all;
        }
        for (int i = 0; i < LANES; ++i) most = std::max(most, all[i]);
    }
    for (; s < count; ++s) most = std::max(most, x[s]);
    return most;
}

// The largest of some numbers, as `largest` says; NAN if one is none.
inline float largest_or_none(const float* x, int64_t count) {
    decltype(Lanes{} != Lanes{}) nones = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Lanes some = load<Lanes>(x + i);
        nones |= some != some;
    }
    int32_t none = 0;
    for (int k = 0; k < LANES; ++k) none |= nones[k];
    for (; i < count; ++i) none |= x[i] != x[i];
    return none ? NAN : largest(x, count);
}

// The first of the likeliest; -1 where nothing is possible, or something is no number.
inline int64_t likeliest(const float* logits, int64_t count) {
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

}  // namespace
}  // namespace forerun
