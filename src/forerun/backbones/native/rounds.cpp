// Rounds of drafts and verdicts on them: drafts are copies of a text's own, or what a second model says.

#include "model.h"
#include "numbers.h"

#include <chrono>
#include <vector>

using namespace forerun;

namespace {

// A drafter that looks into its target: how, and what it drafts from a block behind a text.
struct LookingDrafter {
    const Fusion* fusion;
    const float* const* states;  // of the target
    const Rows* target;  // whose pages say where they are
    int64_t block, mask;  // its rows, and what stands for those behind the last token
    int64_t drafted;  // tokens that it ever drafts
    const int64_t* tokens;  // these; null: all
    int64_t gathers;  // must their logits be picked out of those of all tokens?
    int64_t rank;  // of a correction by the token before, added to logits; 0: there is none
    const float* before;  // [token][rank]
    const Matrix* after;
    float* moved;  // memory for logits of all texts, and for the rows that corrections are made of
    float* memory;  // for rows of context
};

// A model that takes part in rounds of drafts and verdicts.
struct Runner {
    const Model* model;
    const Rows* rows;  // but for the rows themselves: they are laid out here
    int64_t most_rows, slots;  // of a forward, and that a row sees
    const int64_t* threads;  // that a forward of so many rows takes
    double* seconds;  // that forwards of so many rows took
    int64_t* forwards;  // how many of so many rows there were
    int64_t* attended;  // two numbers: (row, slot) pairs, and slots
    const int64_t* impossible;  // among its logits
    int64_t impossible_count;
    const LookingDrafter* looking;  // unless it is a model of its own

    int64_t outputs() const { return model->head.outputs; }
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
    const int64_t* draft_room;  // and the model that drafts
    const int64_t* most;  // tokens of a draft
    const int64_t* run;  // of last tokens that is looked up for a copy; 0: a model drafts
    const int64_t* mask;  // what stands for a blank, if that one fills blanks; else -1
    const int64_t* shifted;  // does a row of it speak of the token after its own?
    const int64_t* ends;  // tokens that end one, text after text
    const int64_t* ends_until;  // where each text's are over
    int64_t* found;  // [round][text]: drafted tokens, -1 of who is over; accepted; token; the draft
    const volatile int64_t* stop;  // looked at after each round: if set, no more
};

int64_t slot_of(const Rows& rows, int64_t lane, int64_t place) {
    const int64_t page = rows.pages[lane * rows.pages_per_lane + place / rows.page_size];
    return page + place % rows.page_size;
}

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
        of.attended[0] += (end - first) * end;
        of.attended[1] += end;
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
        of.attended[0] += count * (end + length - first);
        of.attended[1] += count;
    }

    // A block behind so many tokens of a text: the next one, and masks. All see what is before them and
    // each other. The first masks are read.
    void add_block(int64_t lane, int64_t token, const LookingDrafter& looking, int64_t first,
                   int64_t reads) {
        const int64_t end = first + looking.block;
        for (int64_t place = first; place < end; ++place) {
            if (place > first && place <= first + reads) read.push_back(tokens.size());
            add_row(lane, place == first ? token : looking.mask, place);
            horizon.push_back(static_cast<int32_t>(first));
            lo.push_back(static_cast<int32_t>(first));
            hi.push_back(static_cast<int32_t>(end));
        }
    }

    void add_row(int64_t lane, int64_t token, int64_t place) {
        tokens.push_back(token);
        positions.push_back(place);
        slots.push_back(slot_of(*of.rows, lane, place));
        lanes.push_back(lane);
    }
};

// Rows of texts that a drafter looks at.
struct ContextRows {
    std::vector<int64_t> positions, slots, sources;

    void add(const Runner& of, int64_t lane, int64_t first, int64_t end) {
        for (int64_t place = first; place < end; ++place) {
            positions.push_back(place);
            slots.push_back(slot_of(*of.rows, lane, place));
            sources.push_back(slot_of(*of.looking->target, lane, place));
        }
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
    const Runner* drafter;  // unless all drafts are copies
    std::vector<int64_t> wished, drafted, accepted, token;
    std::vector<bool> over;

    Launch(Rounds& rounds, const Runner* by)
        : all(rounds), drafter(by), wished(rounds.texts), drafted(rounds.texts),
          accepted(rounds.texts), token(rounds.texts), over(rounds.texts, false) {}

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
            if (!drafts_by_model(i)) continue;
            const int64_t more = drafter->looking ? drafter->looking->block - 1 : wished[i];
            if (all.length[i] + more > all.draft_room[i]) return false;
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

    // Token after token, by a model of its own?
    bool drafts_in_turn(int64_t i) const {
        return !all.run[i] && all.mask[i] < 0 && !(drafter && drafter->looking);
    }

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

    // Look into the target, and fill a block of masks behind each text. Is every drafted token possible?
    bool look(Laid& laid) {
        const Runner& of = laid.of;
        std::vector<int64_t> asked;
        ContextRows seen;
        laid.clear();
        for (int64_t i = 0; i < all.texts; ++i) {
            if (!drafts_by_model(i)) continue;
            asked.push_back(i);
            const int64_t lane = all.lanes[i], first = all.length[i] - 1;
            seen.add(of, lane, all.held[i], first);
            laid.add_block(lane, text(i)[first], *of.looking, first, wished[i]);
            const int64_t rows = first - all.held[i] + of.looking->block;
            of.attended[0] += rows * (first + of.looking->block);
            of.attended[1] += first + of.looking->block;
            all.held[i] = first;
        }
        if (asked.empty()) return true;
        run(laid, &seen);
        return draw_chains(of, asked);
    }

    // Give each its likeliest tokens, one after the other, each moved by the one before it.
    bool draw_chains(const Runner& of, std::vector<int64_t> asked) {
        const LookingDrafter& looking = *of.looking;
        std::vector<const float*> logits;
        const float* at = of.rows->logits;
        for (const int64_t i : asked) {
            logits.push_back(at);
            at += wished[i] * of.outputs();
        }
        while (!asked.empty()) {
            if (looking.rank) correct(of, asked);
            size_t left = 0;
            for (size_t n = 0; n < asked.size(); ++n) {
                const int64_t i = asked[n];
                const float* own = of_drafted(looking, logits[n], looking.moved + n * looking.drafted);
                const int64_t place = likeliest(own, looking.drafted);
                if (place < 0) return false;
                const int64_t found = looking.tokens ? looking.tokens[place] : place;
                text(i)[all.length[i] + drafted[i]++] = static_cast<int32_t>(found);
                if (drafted[i] == wished[i] || ends(i, found)) continue;
                asked[left] = i;
                logits[left++] = logits[n] + of.outputs();
            }
            asked.resize(left);
        }
        return true;
    }

    // What the last token of each moves logits by.
    void correct(const Runner& of, const std::vector<int64_t>& asked) {
        const LookingDrafter& looking = *of.looking;
        const int64_t count = asked.size(), rank = looking.rank;
        float* rows = looking.moved + count * looking.drafted;
        for (int64_t n = 0; n < count; ++n) {
            const int64_t i = asked[n], last = text(i)[all.length[i] + drafted[i] - 1];
            std::copy_n(looking.before + last * rank, rank, rows + n * rank);
        }
        product(looking.after, rows, count, rows + count * rank, of.threads[count], looking.moved);
    }

    // Logits of the tokens that are drafted, moved by what is in `to` if there are corrections.
    static const float* of_drafted(const LookingDrafter& looking, const float* logits, float* to) {
        if (!looking.rank && !looking.gathers) return logits;
        for (int64_t i = 0; i < looking.drafted; ++i) {
            const float own = looking.gathers ? logits[looking.tokens[i]] : logits[i];
            to[i] = looking.rank ? own + to[i] : own;
        }
        return to;
    }

    // Have the model draft. Is every drafted token possible?
    bool draft(Laid& laid) {
        return laid.of.looking ? look(laid) : fill_blanks(laid) && draft_in_turn(laid);
    }

    // Token after token. Is every drafted token possible?
    bool draft_in_turn(Laid& laid) {
        std::vector<int64_t> asked, next;
        laid.clear();
        for (int64_t i = 0; i < all.texts; ++i) {
            if (!drafts_by_model(i) || !drafts_in_turn(i)) continue;
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
            if (drafted[i] && drafts_in_turn(i))
                all.held[i] = all.length[i] + std::min(n, drafted[i] - 1);
            const bool accepted_end = n && ends(i, draft[n - 1]);
            draft[n] = static_cast<int32_t>(token[i]);
            all.length[i] += n + 1;
            over[i] = accepted_end || ends(i, token[i]) || all.length[i] >= all.wanted[i];
            one_ended = one_ended || over[i];
            all_ended = all_ended && over[i];
        }
    }

    void run(Laid& laid, const ContextRows* seen = nullptr) {
        const Runner& of = laid.of;
        const int64_t looked = seen ? seen->slots.size() : 0, count = looked + laid.tokens.size();
        Rows rows = *of.rows;
        rows.rows = laid.tokens.size();
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
        if (looked) look_at(of, *seen, rows.threads);
        forward(of.model, &rows, of.slots);
        of.seconds[count] += seconds_since(begin);
        ++of.forwards[count];
        for (int64_t row = 0; row < rows.reads; ++row)
            for (int64_t i = 0; i < of.impossible_count; ++i)
                rows.logits[row * of.outputs() + of.impossible[i]] = -INFINITY;
    }

    static void look_at(const Runner& of, const ContextRows& seen, int64_t threads) {
        const Context context = {
            static_cast<int64_t>(seen.slots.size()), threads, seen.positions.data(),
            seen.slots.data(), seen.sources.data(), of.looking->states, of.rows->kept,
            of.looking->memory};
        ::look(of.model, of.looking->fusion, &context);
    }
};

}  // namespace

extern "C" {

void round_sizes(int64_t* of) {
    of[0] = sizeof(LookingDrafter);
    of[1] = sizeof(Runner);
    of[2] = sizeof(Rounds);
}

// Draft and judge until all texts have ended. How many rounds that took.
int64_t go_on(const Runner* target, const Runner* drafter, Rounds* given) {
    Rounds& all = *given;
    Launch launch(all, drafter);
    Laid judged(*target), drafts(drafter ? *drafter : *target);
    const Clock::time_point begin = Clock::now();
    double before = 0, longest = 0;
    bool one_ended = false, all_ended = false;
    for (int64_t round = 0; round < all.rounds; ++round) {
        if (*all.stop || before + longest > all.seconds || !launch.wish()) return round;
        launch.draft_copies();
        if (drafter && !launch.draft(drafts)) return round;
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

}  // extern "C"
