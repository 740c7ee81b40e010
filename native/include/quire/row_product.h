// The product of rows with one matrix, on a team of threads: for rows outside of a decoder's steps.
//
// The bits of a row do not depend on the other rows, or on the thread that computes it.
#pragma once

#include <optional>

#include "quire/decoder.h"

namespace quire {

class RowProduct {
  public:
    // Packs the matrix; `bias` has a number for each output, or is null. Throws std::bad_alloc.
    RowProduct(const Kernels& kernels, ThreadTeam& team, const MatrixRows& rows, const float* bias);

    int num_inputs() const { return matrix_.view().num_inputs; }
    // The numbers of a row of the output: those of the matrix, rounded up to whole panels.
    int output_stride() const { return matrix_.view().num_panels() * kPanelWidth; }
    std::size_t num_bytes() const { return matrix_.num_bytes(); }

    // output = activation(input * matrix^T + bias). Throws std::bad_alloc.
    void run(const Rows& input, int num_rows, const Rows& output, std::optional<Activation> activation) const;

  private:
    const Kernels& kernels_;
    ThreadTeam& team_;
    Arena memory_;
    PackedMatrix matrix_;
};

}  // namespace quire
