// Matrices as products take them: in strips of floats, or the nearest in blocks of 4 or 8 bits.
// They come as floats, or in blocks of a GGUF file, whose values are those of `blocks.py`, bit for
// bit.
//
// Every processor makes the same of them: it is compiled so that no product and sum are one
// operation.

#include "model.h"
#include "numbers.h"

#include <cstdlib>

namespace forerun {
namespace {

constexpr int WIDENED_AT_ONCE = 256;  // a multiple of the values of every kind of block
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

// The nearest whole number within some bounds.
inline float nearest(float x, float low, float high) {
    const float found = (x + WHOLE) - WHOLE;
    const float above = found < low ? low : found;
    return above > high ? high : above;
}

// What follows goes through a group in halves, each a loop that a compiler turns into few instructions.
constexpr int HALF = GROUP / 2;

inline float smallest(float* of_half) {
    for (int count = HALF / 2; count; count /= 2)
        for (int i = 0; i < count; ++i) of_half[i] = std::min(of_half[i], of_half[i + count]);
    return of_half[0];
}

inline float lowest(const float* w) {
    float least[HALF];
    for (int i = 0; i < HALF; ++i) least[i] = std::min(w[i], w[HALF + i]);
    return smallest(least);
}

inline float highest(const float* w) {
    float least[HALF];
    for (int i = 0; i < HALF; ++i) least[i] = -std::max(w[i], w[HALF + i]);
    return -smallest(least);
}

// Zero; where a weight of a group is no number, or infinite, no number either.
inline float nothing(const float* w) {
    float none[HALF];
    for (int i = 0; i < HALF; ++i) none[i] = w[i] * 0 + w[HALF + i] * 0;
    return added(in_four(load<Wide>(none)));
}

// The weights of a group as 16 values, a step apart, from the lowest on.
struct Grid {
    float step, middle, error;
    float codes[GROUP];

    Grid(const float* w, float apart, float low) {
        step = rounded(apart);
        if (step == 0) step = 1;
        middle = low + 8 * step;
        const float back = 1 / step;
        float squares[HALF] = {};
        for (int i = 0; i < GROUP; ++i) codes[i] = nearest((w[i] - low) * back, 0, 15);
        for (int half = 0; half < GROUP; half += HALF)
            for (int i = 0; i < HALF; ++i) {
                const float off = middle + (codes[half + i] - 8) * step - w[half + i];
                squares[i] += off * off;
            }
        error = added(in_four(load<Wide>(squares)));
    }
};

// From the lowest weight to the highest, as files of the kinds Q4_1 and Q4_K have them, or from the
// largest to the other side, as those of the kind Q4_0.
inline Grid nearer_grid(const float* w) {
    const float low = lowest(w), high = highest(w);
    const Grid whole(w, (high - low) / 15, low);
    const float largest = high > -low ? high : low;
    const Grid around(w, largest / -8, largest);
    return whole.error <= around.error ? whole : around;
}

// One output of a block: codes, four inputs of each output at a time; then the scale, and in 4 bits
// what a code of 0 stands for.
void pack_4(const float* w, int output, uint8_t* block) {
    const Grid grid = nearer_grid(w);
    uint8_t codes[HALF];
    for (int i = 0; i < HALF; ++i) {
        const int low = static_cast<int>(grid.codes[i]), high = static_cast<int>(grid.codes[HALF + i]);
        codes[i] = static_cast<uint8_t>(low | high << 4);
    }
    for (int j = 0; j < 4; ++j) std::memcpy(block + 4 * (j * SIDE + output), codes + 4 * j, 4);
    keep_bfloat16(grid.step + nothing(w), block + 16 * SIDE + 2 * output);
    keep_bfloat16(grid.middle - 8 * grid.step, block + 18 * SIDE + 2 * output);
}

void pack_8(const float* w, int output, uint8_t* block) {
    const float most = std::max(-lowest(w), highest(w));
    const float scale = rounded(most == 0 ? 1 : most / 127), back = 1 / scale;
    int8_t codes[GROUP];
    for (int i = 0; i < GROUP; ++i)
        codes[i] = static_cast<int8_t>(static_cast<int>(nearest(w[i] * back, -127, 127)));
    for (int j = 0; j < 8; ++j) std::memcpy(block + 4 * (j * SIDE + output), codes + 4 * j, 4);
    keep_bfloat16(scale + nothing(w), block + 32 * SIDE + 2 * output);
}

// Some inputs of an output, as so many bits: where the next ones go.
uint8_t* pack_some(const float* some, int64_t count, int64_t bits, int place, uint8_t* to) {
    if (bits == FLOATS) {
        float* strip = reinterpret_cast<float*>(to) + place;
        for (int64_t i = 0; i < count; ++i) strip[i * STRIP] = some[i];
        return to + count * STRIP * 4;
    }
    for (int64_t i = 0; i < count; i += GROUP, to += block_bytes(bits)) {
        bits == 4 ? pack_4(some + i, place, to) : pack_8(some + i, place, to);
    }
    return to;
}

// A number in half precision.
float half_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    const uint32_t rest = half & 0x7fffu;
    // The smallest are whole numbers of steps: a float of their bits may count as zero here.
    float size = static_cast<float>(rest) * 0x1p-24f;
    if (rest >= 0x400u) {
        const uint32_t bits = (rest << 13) + (rest >= 0x7c00u ? 0x70000000u : 0x38000000u);
        std::memcpy(&size, &bits, 4);
    }
    return half & 0x8000u ? -size : size;
}

// Kinds of blocks, as files number them. Of each: its values, its bytes, and the values of a block.
struct Q4_0 {
    static constexpr int number = 2, values = 32, size = 18;
    static void widen(const uint8_t* block, float* to) {
        const float scale = half_at(block);
        for (int i = 0; i < 16; ++i) {
            to[i] = static_cast<float>((block[2 + i] & 15) - 8) * scale;
            to[16 + i] = static_cast<float>((block[2 + i] >> 4) - 8) * scale;
        }
    }
};

struct Q4_1 {
    static constexpr int number = 3, values = 32, size = 20;
    static void widen(const uint8_t* block, float* to) {
        const float scale = half_at(block), lowest = half_at(block + 2);
        for (int i = 0; i < 16; ++i) {
            to[i] = static_cast<float>(block[4 + i] & 15) * scale + lowest;
            to[16 + i] = static_cast<float>(block[4 + i] >> 4) * scale + lowest;
        }
    }
};

struct Q5_0 {
    static constexpr int number = 6, values = 32, size = 22;
    static void widen(const uint8_t* block, float* to) {
        const float scale = half_at(block);
        uint32_t fifth;
        std::memcpy(&fifth, block + 2, 4);
        for (int i = 0; i < 16; ++i) {
            const int low = (block[6 + i] & 15) | (fifth >> i & 1) << 4;
            const int high = block[6 + i] >> 4 | (fifth >> (16 + i) & 1) << 4;
            to[i] = static_cast<float>(low - 16) * scale;
            to[16 + i] = static_cast<float>(high - 16) * scale;
        }
    }
};

struct Q8_0 {
    static constexpr int number = 8, values = 32, size = 34;
    static void widen(const uint8_t* block, float* to) {
        const float scale = half_at(block);
        for (int i = 0; i < 32; ++i) {
            to[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
        }
    }
};

// Of 32 values in a block that has 8 times as many: their scale, and what is taken off them. Both
// are 6 bits, packed with those of the others into the 12 bytes behind two in half precision.
struct OfEight {
    float scale, off;
    OfEight(const uint8_t* block, int part) {
        const uint8_t *first = block + 4 + part % 4, *second = first + 4, *rest = second + 4;
        int of_scale = *first & 63, of_off = *second & 63;
        if (part >= 4) {
            of_scale = (*rest & 15) | (*first >> 2 & 48);
            of_off = *rest >> 4 | (*second >> 2 & 48);
        }
        scale = half_at(block) * static_cast<float>(of_scale);
        off = half_at(block + 2) * static_cast<float>(of_off);
    }
};

struct Q4_K {
    static constexpr int number = 12, values = 256, size = 144;
    static void widen(const uint8_t* block, float* to) {
        for (int part = 0; part < 8; ++part) {
            const OfEight own(block, part);
            const uint8_t* codes = block + 16 + 32 * (part / 2);
            const int shift = 4 * (part % 2);
            for (int i = 0; i < 32; ++i) {
                const int code = codes[i] >> shift & 15;
                to[32 * part + i] = static_cast<float>(code) * own.scale - own.off;
            }
        }
    }
};

struct Q5_K {
    static constexpr int number = 13, values = 256, size = 176;
    static void widen(const uint8_t* block, float* to) {
        for (int part = 0; part < 8; ++part) {
            const OfEight own(block, part);
            const uint8_t* codes = block + 48 + 32 * (part / 2);
            const int shift = 4 * (part % 2);
            for (int i = 0; i < 32; ++i) {
                const int code = (codes[i] >> shift & 15) | (block[16 + i] >> part & 1) << 4;
                to[32 * part + i] = static_cast<float>(code) * own.scale - own.off;
            }
        }
    }
};

struct Q6_K {
    static constexpr int number = 14, values = 256, size = 210;
    static void widen(const uint8_t* block, float* to) {
        const float whole = half_at(block + 208);
        for (int part = 0; part < 16; ++part) {  // of 16 values
            const float scale = whole * static_cast<float>(static_cast<int8_t>(block[192 + part]));
            const int at = 16 * (part % 8), side = part / 8;
            const uint8_t* codes = block + 64 * side + at % 64;
            const uint8_t* above = block + 128 + 32 * side + at % 32;
            const int shift = 4 * (at / 64), shift_above = 2 * (at / 32);
            for (int i = 0; i < 16; ++i) {
                const int code = (codes[i] >> shift & 15) | (above[i] >> shift_above & 3) << 4;
                to[16 * part + i] = static_cast<float>(code - 32) * scale;
            }
        }
    }
};

// What the values of a matrix lie in: so many in so many bytes, and how they become floats.
struct Source {
    int64_t values, size;
    void (*widen)(const uint8_t*, int64_t, float*);  // some values; none if they are floats

    template <typename Kind>
    static void widen_some(const uint8_t* from, int64_t count, float* to) {
        for (int64_t i = 0; i < count; i += Kind::values, from += Kind::size) {
            Kind::widen(from, to + i);
        }
    }

    template <typename Kind>
    static Source in() {
        return {Kind::values, Kind::size, widen_some<Kind>};
    }

    static Source of(int64_t kind) {
        switch (kind) {
            case Q4_0::number: return in<Q4_0>();
            case Q4_1::number: return in<Q4_1>();
            case Q5_0::number: return in<Q5_0>();
            case Q8_0::number: return in<Q8_0>();
            case Q4_K::number: return in<Q4_K>();
            case Q5_K::number: return in<Q5_K>();
            case Q6_K::number: return in<Q6_K>();
            case 0: return {1, 4, nullptr};
            default: std::abort();  // a kind that Python names and this file does not
        }
    }

    int64_t bytes(int64_t count) const { return count / values * size; }
};

}  // namespace
}  // namespace forerun

using namespace forerun;

extern "C" {

// The bytes of a strip, or of the blocks beside each other that have the same outputs.
int64_t packed_bytes(int64_t inputs, int64_t bits) {
    return bits == FLOATS ? inputs * 4 * STRIP : inputs / GROUP * block_bytes(bits);
}

// The values of some rows of blocks: from the first to the end.
void widen(const uint8_t* from, int64_t kind, int64_t inputs, int64_t first, int64_t end,
           float* to) {
    const Source source = Source::of(kind);
    const int64_t begin = first * inputs;
    source.widen(from + source.bytes(begin), (end - first) * inputs, to + begin);
}

// Some of them: from the first to the end. Outputs that there are not are zeros.
void pack(const uint8_t* from, int64_t kind, int64_t outputs, int64_t inputs, int64_t bits,
          int64_t first, int64_t end, uint8_t* to) {
    const Source source = Source::of(kind);
    const int64_t side = bits == FLOATS ? STRIP : SIDE, size = packed_bytes(inputs, bits);
    if (end * side > outputs) std::memset(to + (end - 1) * size, 0, size);
    float widened[WIDENED_AT_ONCE];
    for (int64_t o = first * side; o < std::min(outputs, end * side); ++o) {
        uint8_t* part = to + o / side * size;
        const int place = static_cast<int>(o % side);
        for (int64_t i = 0; i < inputs; i += WIDENED_AT_ONCE) {
            const int64_t count = std::min<int64_t>(WIDENED_AT_ONCE, inputs - i);
            const uint8_t* stored = from + source.bytes(o * inputs + i);
            if (source.widen) source.widen(stored, count, widened);
            const float* some = source.widen ? widened : reinterpret_cast<const float*>(stored);
            part = pack_some(some, count, bits, place, part);
        }
    }
}

}  // extern "C"
