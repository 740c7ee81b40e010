#include <atomic>
#include <cstring>

#include "quire/decoder.h"

namespace quire {

void PackedMatrix::pack(const Kernels& kernels, ThreadTeam* team, Arena& memory, const MatrixRows& rows, StoredType as,
                        Form form) {
    shape_.type = packed_type(as);
    if (has_blocks(as)) shape_.coding = coding_of(as);
    shape_.num_outputs = rows.num_outputs;
    shape_.num_inputs = rows.num_inputs;
    if (form == Form::kSmallest && as == StoredType::kBfloat16 && kernels.has_compact) {
        const std::size_t plain_bytes = kernels.packed_bytes(shape_);
        shape_.type = NumberType::kCompact;
        if (kernels.packed_bytes(shape_) < plain_bytes) {
            if (fill(kernels, team, memory, rows, as)) return;
            memory.give_back(shape_.panels);
        }
        shape_.type = NumberType::kBfloat16;
    }
    fill(kernels, team, memory, rows, as);
}

bool PackedMatrix::fill(const Kernels& kernels, ThreadTeam* team, Arena& memory, const MatrixRows& rows,
                        StoredType as) {
    constexpr int kPanelsPerPiece = 16;
    const int num_panels = shape_.num_panels(), num_pieces = (num_panels + kPanelsPerPiece - 1) / kPanelsPerPiece;
    panel_bytes_ = kernels.packed_bytes(shape_);
    std::byte* panels = memory.take(panel_bytes_);
    shape_.panels = panels;
    if (team == nullptr) return kernels.pack_panels(rows, shape_, as, panels, 0, num_panels);
    std::atomic<bool> fits = true;
    team->run([&fits, &kernels, rows, as, shape = shape_, panels, num_panels, num_pieces](auto& member) {
        member.for_pieces(num_pieces, [&](int piece) {
            const int first = piece * kPanelsPerPiece;
            const int count = num_panels - first < kPanelsPerPiece ? num_panels - first : kPanelsPerPiece;
            if (fits && !kernels.pack_panels(rows, shape, as, panels, first, count)) fits = false;
        });
    });
    return fits;
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
