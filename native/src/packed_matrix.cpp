#include <cstring>

#include "quire/decoder.h"

namespace quire {

void PackedMatrix::pack(const Kernels& kernels, ThreadTeam* team, Arena& memory, const MatrixRows& rows,
                        StoredType as) {
    shape_.type = packed_type(as);
    if (has_blocks(as)) shape_.coding = coding_of(as);
    shape_.num_outputs = rows.num_outputs;
    shape_.num_inputs = rows.num_inputs;
    const int num_panels = shape_.num_panels();
    panel_bytes_ = kernels.packed_bytes(shape_);
    std::byte* panels = memory.take(panel_bytes_);
    shape_.panels = panels;
    constexpr int kPanelsPerPiece = 16;
    const int num_pieces = (num_panels + kPanelsPerPiece - 1) / kPanelsPerPiece;
    if (team == nullptr) return kernels.pack_panels(rows, shape_, as, panels, 0, num_panels);
    team->run([&kernels, rows, as, shape = shape_, panels, num_panels, num_pieces](auto& member) {
        member.for_pieces(num_pieces, [&](int piece) {
            const int first = piece * kPanelsPerPiece;
            const int count = num_panels - first < kPanelsPerPiece ? num_panels - first : kPanelsPerPiece;
            kernels.pack_panels(rows, shape, as, panels, first, count);
        });
    });
}

void PackedMatrix::set_bias(const float* bias, int count) {
    const int padded = round_up(count, kPanelWidth);
    bias_.allocate(padded);
    std::memset(bias_.data(), 0, padded * sizeof(float));
    std::memcpy(bias_.data(), bias, count * sizeof(float));
}

MatrixView PackedMatrix::view() const {
    MatrixView result = shape_;
    result.bias = bias_.data();
    return result;
}

}  // namespace quire
