// Matrices of floats as products take them: in strips, or the nearest in blocks of 4 or 8 bits.

// Every processor makes the same of them: no product and sum are one operation.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "model.h"
#include "numbers.h"

namespace forerun {
namespace {

constexpr float WHOLE = 12582912.0f;  // what was added to it has no fraction any more

uint16_t as_bfloat16(float x) {
    if (x != x) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void keep_bfloat16(float x, uint8_t* to) {
    const uint16_t half = as_bfloat16(x);
    std::memcpy(to, &half, 2);
}

float rounded(float x) {
    const uint32_t bits = static_cast<uint32_t>(as_bfloat16(x)) << 16;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The nearest whole numbers within some bounds.
Sixteen nearest(const Sixteen& x, float low, float high) {
    const Sixteen found = (x + WHOLE) - WHOLE;
    const Sixteen above = found < low ? Sixteen{} + low : found;
    return above > high ? Sixteen{} + high : above;
}

// Zero; where a weight of a group is no number, or infinite, no number either.
float nothing(const float* weights) {
    float sum = 0;
    for (int i = 0; i < GROUP; ++i) sum += weights[i] * 0;
    return sum;
}

// The weights of a group as 16 values, a step apart, from the lowest on.
struct Grid {
    float step, middle, error;
    Sixteen codes[2];

    Grid(const Sixteen* w, float apart, float lowest) {
        step = rounded(apart);
        if (step == 0) step = 1;
        middle = lowest + 8 * step;
        Sixteen squares = {};
        for (int half = 0; half < 2; ++half) {
            codes[half] = nearest((w[half] - lowest) * (1 / step), 0, 15);
            const Sixteen off = middle + (codes[half] - 8) * step - w[half];
            squares += off * off;
        }
        error = added(in_four(squares));
    }
};

// From the lowest weight to the highest, as files of the kinds Q4_1 and Q4_K have them, or from the
// largest to the other side, as those of the kind Q4_0.
Grid nearer_grid(const float* weights) {
    const Sixteen w[2] = {load<Sixteen>(weights), load<Sixteen>(weights + 16)};
    float low = w[0][0], high = w[0][0];
    for (int i = 0; i < GROUP; ++i) {
        low = std::min(low, weights[i]);
        high = std::max(high, weights[i]);
    }
    const Grid whole(w, (high - low) / 15, low);
    const float largest = high > -low ? high : low;
    const Grid around(w, largest / -8, largest);
    return whole.error <= around.error ? whole : around;
}

// One output of a block: codes, four inputs of each output at a time; then the scale, and in 4 bits
// what a code of 0 stands for.
void pack_4(const float* weights, int output, uint8_t* block) {
    const Grid grid = nearer_grid(weights);
    uint8_t codes[16];
    for (int i = 0; i < 16; ++i) {
        codes[i] = static_cast<uint8_t>(static_cast<int>(grid.codes[0][i]) |
                                        static_cast<int>(grid.codes[1][i]) << 4);
    }
    for (int j = 0; j < 4; ++j) std::memcpy(block + 4 * (j * SIDE + output), codes + 4 * j, 4);
    keep_bfloat16(grid.step + nothing(weights), block + 16 * SIDE + 2 * output);
    keep_bfloat16(grid.middle - 8 * grid.step, block + 18 * SIDE + 2 * output);
}

void pack_8(const float* weights, int output, uint8_t* block) {
    float most = 0;
    for (int i = 0; i < GROUP; ++i) most = std::max(most, std::fabs(weights[i]));
    const float scale = rounded(most == 0 ? 1 : most / 127);
    int8_t codes[GROUP];
    for (int i = 0; i < GROUP; i += 16) {
        const Sixteen found = nearest(load<Sixteen>(weights + i) * (1 / scale), -127, 127);
        for (int j = 0; j < 16; ++j) codes[i + j] = static_cast<int8_t>(found[j]);
    }
    for (int j = 0; j < 8; ++j) std::memcpy(block + 4 * (j * SIDE + output), codes + 4 * j, 4);
    keep_bfloat16(scale + nothing(weights), block + 32 * SIDE + 2 * output);
}

}  // namespace
}  // namespace forerun

using namespace forerun;

extern "C" {

// The bytes of a strip, or of the blocks beside each other that have the same outputs.
int64_t packed_bytes(int64_t inputs, int64_t bits) {
    return bits == FLOATS ? inputs * 4 * STRIP : inputs / GROUP * block_bytes(bits);
}

// Some of them: from the first to the end. Outputs that there are not are zeros.
void pack(const float* weights, int64_t outputs, int64_t inputs, int64_t bits, int64_t first,
          int64_t end, uint8_t* to) {
    const int64_t side = bits == FLOATS ? STRIP : SIDE, size = packed_bytes(inputs, bits);
    if (end * side > outputs) std::memset(to + (end - 1) * size, 0, size);
    for (int64_t o = first * side; o < std::min(outputs, end * side); ++o) {
        const float* row = weights + o * inputs;
        uint8_t* part = to + o / side * size;
        const int place = static_cast<int>(o % side);
        if (bits == FLOATS) {
            float* strip = reinterpret_cast<float*>(part) + place;
            for (int64_t i = 0; i < inputs; ++i) strip[i * STRIP] = row[i];
            continue;
        }
        for (int64_t i = 0; i < inputs; i += GROUP, part += block_bytes(bits)) {
            bits == 4 ? pack_4(row + i, place, part) : pack_8(row + i, place, part);
        }
    }
}

}  // extern "C"
