// Drafts verified on the device, and the rows of the step after them, as MLX operations.

#include "operation.h"

namespace quire {
namespace {

// The first row of each sequence whose token is not its draft, int32 [N]. `starts`: first rows, and how many rows.
array first_different(const array& tokens, const array& drafts, const std::vector<int>& starts) {
    using namespace mlx::core;
    require(tokens.dtype() == int32 && drafts.dtype() == int32 && tokens.size() == drafts.size() &&
                starts.size() > 1 && starts.front() == 0 && starts.back() == (int)drafts.size(),
            "each row has a token and a draft, and each sequence a first row");
    return operation("quire::first_different", {Shape{(int)starts.size() - 1}}, {tokens, drafts},
                     [starts](const std::vector<array>& in, std::vector<array>& out) {
        return [starts, tokens = in[0].data<int32_t>(), drafts = in[1].data<int32_t>(),
                first = out[0].data<int32_t>()] {
            for (size_t s = 0; s + 1 < starts.size(); s++) {
                int row = starts[s];
                while (row < starts[s + 1] - 1 && tokens[row] == drafts[row]) row++;
                first[s] = row;
            }
        };
    }, {int32}, (int64_t)tokens.size())[0];
}

// Guesses [N, count] as far as the product of their chances is at least `least`; ~guess, which is negative, from there
// on.
array likely_only(const array& guesses, const array& chances, float least) {
    using namespace mlx::core;
    require(guesses.dtype() == int32 && chances.dtype() == float32 && guesses.ndim() == 2 &&
                guesses.shape() == chances.shape(),
            "each guess has a chance");
    return operation("quire::likely_only", {guesses.shape()}, {guesses, chances},
                     [least](const std::vector<array>& in, std::vector<array>& out) {
        return [least, guesses = in[0].data<int32_t>(), chances = in[1].data<float>(), rows = in[0].shape(0),
                count = in[0].shape(1), to = out[0].data<int32_t>()] {
            for (int row = 0; row < rows; row++) {
                float chance = 1;
                for (int i = row * count; i < (row + 1) * count; i++) {
                    chance *= chances[i];
                    to[i] = chance >= least ? guesses[i] : ~guesses[i];
                }
            }
        };
    }, {int32})[0];
}

// Tokens [T] of a step's rows. Row t has `known[t]` if `places[t]` is -1, else a token of that sequence of the step
// before, int32 [T]: the sampled one that it goes on from, `tokens[kept[place]]`, or its guess number `known[t]` from 1.
array followed_tokens(const array& tokens, const array& kept, const array& guesses, const std::vector<int32_t>& known,
                      const std::vector<int32_t>& places) {
    using namespace mlx::core;
    require(tokens.dtype() == int32 && kept.dtype() == int32 && guesses.dtype() == int32 && guesses.ndim() == 2 &&
                guesses.shape(0) == (int)kept.size() && known.size() == places.size(),
            "each sequence has a row and guesses, all int32");
    for (size_t t = 0; t < known.size(); t++)
        require(places[t] < (int)kept.size() && (places[t] < 0 || (known[t] >= 0 && known[t] <= guesses.shape(1))),
                "a row follows a sequence, or one of its guesses");
    return operation("quire::followed_tokens", {Shape{(int)known.size()}}, {tokens, kept, guesses},
                     [known, places](const std::vector<array>& in, std::vector<array>& out) {
        return [known, places, tokens = in[0].data<int32_t>(), kept = in[1].data<int32_t>(),
                guesses = in[2].data<int32_t>(), most = (int64_t)in[2].shape(1), to = out[0].data<int32_t>()] {
            for (size_t t = 0; t < known.size(); t++) {
                const int64_t place = places[t];
                if (place < 0) to[t] = known[t];
                else to[t] = known[t] == 0 ? tokens[kept[place]] : guesses[place * most + known[t] - 1];
            }
        };
    }, {int32}, (int64_t)known.size())[0];
}

// How many rows of its sequence did not count before each of some numbers, int32 [M]: 0 where `places[i]` is -1, else
// from the last row of that sequence back to the one that it goes on from.
array rows_rejected(const array& kept, const std::vector<int32_t>& lasts, const std::vector<int32_t>& places) {
    using namespace mlx::core;
    require(kept.dtype() == int32 && kept.size() == lasts.size(), "each sequence has a row that it goes on from");
    for (const int32_t place : places) require(place < (int)lasts.size(), "there is no such sequence");
    return operation("quire::rows_rejected", {Shape{(int)places.size()}}, {kept},
                     [lasts, places](const std::vector<array>& in, std::vector<array>& out) {
        return [lasts, places, kept = in[0].data<int32_t>(), to = out[0].data<int32_t>()] {
            for (size_t i = 0; i < places.size(); i++)
                to[i] = places[i] < 0 ? 0 : lasts[places[i]] - kept[places[i]];
        };
    }, {int32})[0];
}

// Numbers [M] that depend on where rows are, less the rows that did not count: of row `rows[i]`, or as they are where
// that is -1. None goes below 0.
array moved_back(const array& numbers, const array& rejected, const std::vector<int32_t>& rows) {
    using namespace mlx::core;
    require(numbers.dtype() == int32 && rejected.dtype() == int32 && numbers.size() == rows.size(),
            "each number belongs to a row, or to none");
    for (const int32_t row : rows) require(row < (int)rejected.size(), "there is no such row");
    return operation("quire::moved_back", {numbers.shape()}, {numbers, rejected},
                     [rows](const std::vector<array>& in, std::vector<array>& out) {
        return [rows, numbers = in[0].data<int32_t>(), rejected = in[1].data<int32_t>(),
                to = out[0].data<int32_t>()] {
            for (size_t i = 0; i < rows.size(); i++)
                to[i] = rows[i] < 0 ? numbers[i] : std::max(0, numbers[i] - rejected[rows[i]]);
        };
    }, {int32})[0];
}

}  // namespace

void bind_drafts(nb::module_& m) {
    m.def("first_different", &first_different, nb::arg("tokens"), nb::arg("drafts"), nb::arg("starts"));
    m.def("likely_only", &likely_only, nb::arg("guesses"), nb::arg("chances"), nb::arg("least"));
    m.def("followed_tokens", &followed_tokens, nb::arg("tokens"), nb::arg("kept"), nb::arg("guesses"),
          nb::arg("known"), nb::arg("places"));
    m.def("rows_rejected", &rows_rejected, nb::arg("kept"), nb::arg("lasts"), nb::arg("places"));
    m.def("moved_back", &moved_back, nb::arg("numbers"), nb::arg("rejected"), nb::arg("rows"));
}

}  // namespace quire
