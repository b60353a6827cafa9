// What a forward is made of: a model, the rows that run, and what its parts take.
//
// A quantised matrix lies in blocks of some outputs by 32 inputs, each with a scale per output, in the
// order in which they are read. Its inputs become 8-bit numbers in groups of 32 with a scale each.
// A matrix of float32 lies in strips of 16 outputs, input by input; its inputs stay as they are.
// Sums within a block are of whole numbers, and the order of all others does not depend on how many
// rows run: a row has the same bits alone and beside others.

#pragma once

#include <algorithm>
#include <cstdint>

namespace forerun {

constexpr int GROUP = 32;
#if defined(__AVX512BW__)
constexpr int SIDE = 16;  // outputs of a block: as many as a register has sums
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int SIDE = 8;
#else
constexpr int SIDE = 4;
#endif
constexpr int STRIP = 16;  // outputs of a strip
constexpr int MOST_ROWS = 8;  // that meet a block at once
constexpr int MOST_TOGETHER = 4;  // queries that look at slots together
constexpr int FLOATS = 32;  // bits

constexpr int64_t block_bytes(int64_t bits) { return bits == 4 ? 20 * SIDE : 34 * SIDE; }

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

// What a drafter makes of its target: hidden states of a token, side by side, are fused, and that gives
// the keys and values of all its layers.
struct Fusion {
    int64_t states;  // of a token
    const float* norms;  // of each of them, unless null
    Matrix fuse;
    const float* norm;
    const Matrix* kept;  // keys and values of each layer
};

// Rows of a text that a drafter looks at.
struct Context {
    int64_t rows, threads;
    const int64_t* positions;
    const int64_t* slots;  // where each lives
    const int64_t* sources;  // and where in the target
    const float* const* states;  // of the target, each [slot][hidden]
    float* const* kept;  // of each layer of the drafter, as in `Rows`
    float* memory;
};

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

// The product of a matrix and rows, y = it or y += it: one of several parts of its outputs.
void multiply(const Matrix& m, const Inputs& x, int64_t part, int64_t parts, float* y, bool add);

// What rows find in the slots of a layer: one of several parts of all heads of all rows. Its scores
// have room for as many slots as a row sees, MOST_TOGETHER times.
void attend(const Model& model, const Rows& rows, const float* kept, const float* qkv, int64_t part,
            int64_t parts, float* scores, int64_t slots, float* out);

}  // namespace forerun

extern "C" {

// Rows to logits. A row sees so many slots at most.
void forward(const forerun::Model* model, const forerun::Rows* rows, int64_t slots);

// The product of rows. `memory` has room for rows * inputs numbers.
void product(const forerun::Matrix* matrix, const float* x, int64_t rows, float* memory,
             int64_t threads, float* y);

// Make keys and values of what a drafter looks at.
void look(const forerun::Model* model, const forerun::Fusion* fusion, const forerun::Context* context);

}  // extern "C"
