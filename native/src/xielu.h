// xIELU, an activation with numbers of its own in each layer: a square above zero, an exponential below.
#pragma once

#include <algorithm>

#include "quire/kernels.h"

namespace quire {

// Replaces each x by slope * x + above * x^2 if it is positive, else by slope * x + below * (e^min(x, limit) - 1 - x).
// `numbers`: above, below, slope, limit.
inline void xielu(const Kernels& kernels, const float* numbers, float* values, int count) {
    constexpr int kAtOnce = 8 * kPanelWidth;
    const float above = numbers[0], below = numbers[1], slope = numbers[2], limit = numbers[3];
    float powers[kAtOnce];
    for (int first = 0; first < count; first += kAtOnce) {
        const int some = std::min(kAtOnce, count - first);
        float* x = values + first;
        for (int i = 0; i < some; ++i) powers[i] = x[i] < limit ? x[i] : limit;
        kernels.exponentials(powers, some, 0.0F, 1.0F, powers);
        for (int i = 0; i < some; ++i) {
            const float curved = x[i] > 0.0F ? above * x[i] * x[i] : below * (powers[i] - 1.0F - x[i]);
            x[i] = slope * x[i] + curved;
        }
    }
}

}  // namespace quire
