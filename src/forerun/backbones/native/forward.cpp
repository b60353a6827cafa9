// A decoder of the Llama shape on a CPU: rows to logits in one call.

#include "model.h"
#include "numbers.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>

using namespace forerun;

namespace {

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

// -- what is around products ----------------------------------------------------------------------

// A thread's share of a product.
void multiply(const Matrix& m, const Inputs& x, float* y, bool add) {
    multiply(m, x, member.own, member.threads, y, add);
}

// The inputs of a matrix, in so much memory as they take as floats.
Inputs inputs_of(const Matrix& m, float* memory, int64_t rows) {
    const int64_t groups = m.inputs / GROUP, all = rows * groups;
    if (m.bits == FLOATS) return {memory, nullptr, nullptr, nullptr, nullptr, rows, groups};
    int32_t* wholes = reinterpret_cast<int32_t*>(memory + 2 * all);
    int8_t* codes = reinterpret_cast<int8_t*>(memory + 3 * all);
    return {nullptr, codes, memory, memory + all, wholes, rows, groups};
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

// Hidden states of a token side by side, each normed if there are norms: a thread's share.
void put_states(const Model& model, const Fusion& fusion, const Context& context, const Inputs& to) {
    const int64_t groups = model.hidden / GROUP;
    const Share share(context.rows * fusion.states);
    for (int64_t item = share.first; item < share.end; ++item) {
        const int64_t row = item / fusion.states, state = item % fusion.states;
        const float* from = context.states[state] + context.sources[row] * model.hidden;
        const float back = fusion.norms ? 1.0f / length(from, model.hidden, model.eps) : 1.0f;
        for (int64_t group = 0; group < groups; ++group) {
            float some[GROUP];
            for (int i = 0; i < GROUP; ++i) some[i] = from[group * GROUP + i];
            if (fusion.norms)
                for (int i = 0; i < GROUP; ++i)
                    some[i] *= back * fusion.norms[state * model.hidden + group * GROUP + i];
            put(some, row, state * groups + group, to);
        }
    }
}

// Write keys, turned, and values of context to where they live.
void keep_context(const Model& model, const Layer& layer, const Context& context, float* kept,
                  const float* kv) {
    const int64_t size = model.head_dim, all = 2 * model.key_heads;
    const Share share(context.rows * all);
    for (int64_t item = share.first; item < share.end; ++item) {
        const int64_t row = item / all, head = item % all;
        const float* turns = model.turns + context.positions[row] * size;
        float* to = kept + (context.slots[row] * all + head) * size;
        if (head < model.key_heads)
            turn(kv + item * size, turns, layer.k_norm, size, model.eps, to);
        else
            std::memcpy(to, kv + item * size, size * sizeof(float));
    }
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
            attend(m, rows, rows.kept[index], qkv, member.own, member.threads, scores, slots, seen);
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

// As Python has them, too.
void model_sizes(int64_t* of) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Layer), sizeof(Model), sizeof(Rows),
                             sizeof(Fusion), sizeof(Context)};
    std::copy(std::begin(sizes), std::end(sizes), of);
}

// Numbers of `memory` that so many rows of context need.
int64_t look_memory(const Model* model, const Fusion* fusion, int64_t rows) {
    const int64_t kept = 2 * model->key_heads * model->head_dim;
    return rows * (model->hidden + fusion->fuse.inputs + kept);
}

void look(const Model* model, const Fusion* fusion, const Context* given) {
    const Model& m = *model;
    const Context& context = *given;
    float* fused = context.memory;
    float* inputs = fused + context.rows * m.hidden;
    float* kv = inputs + context.rows * fusion->fuse.inputs;
    const Inputs of_states = inputs_of(fusion->fuse, inputs, context.rows);
    const Inputs of_fused = inputs_of(fusion->kept[0], inputs, context.rows);
    Barrier barrier;
    helpers->share(context.threads, [&] {
        put_states(m, *fusion, context, of_states);
        barrier.wait();
        multiply(fusion->fuse, of_states, fused, false);
        barrier.wait();
        norm_rows(fused, fusion->norm, m.eps, of_fused);
        for (int64_t index = 0; index < m.layers; ++index) {
            barrier.wait();
            multiply(fusion->kept[index], of_fused, kv, false);
            barrier.wait();
            keep_context(m, m.layer[index], context, context.kept[index], kv);
        }
    });
}

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
