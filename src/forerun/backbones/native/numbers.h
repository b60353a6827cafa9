// Some numbers at a time.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

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
typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t SixteenWhole __attribute__((vector_size(64)));

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

}  // namespace
}  // namespace forerun
