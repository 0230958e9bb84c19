// Choice of experts for rows of logits.
#pragma once

#include <cstdint>

namespace quire {

// How experts are chosen and weighted; see `device/mixture.py`.
struct Routing {
    int experts, k;
    bool sigmoid, normalise;
    float scale, softcap;  // softcap 0: none
    int groups, best_groups, counted;
};

// Of rows [begin, end) the experts [rows, k] by descending score, and their weights. A correction is added to the
// scores for the choice alone, `per_expert` multiplies the weights; either may be null.
void route_rows(const Routing& routing, const float* logits, const float* correction, const float* per_expert,
                int64_t begin, int64_t end, int32_t* chosen, float* weights);

}  // namespace quire
