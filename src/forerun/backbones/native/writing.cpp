// Likeliest tokens that are written one after the other.

#include "model.h"
#include "numbers.h"

#include <vector>

using namespace forerun;

namespace {

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

extern "C" {

int64_t texts_size() { return sizeof(Texts); }

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

}  // extern "C"
