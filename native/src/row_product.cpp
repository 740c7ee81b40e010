#include "quire/row_product.h"

#include "member_rows.h"
#include "quire/linear_pieces.h"

namespace quire {

RowProduct::RowProduct(const Kernels& kernels, ThreadTeam& team, const MatrixRows& rows, const float* bias)
    : kernels_(kernels), team_(team) {
    matrix_.pack(kernels, &team, memory_, rows, rows.type);
    if (bias != nullptr) matrix_.set_bias(bias, rows.num_outputs);
}

void RowProduct::run(const Rows& input, int num_rows, const Rows& output, std::optional<Activation> activation) const {
    const MatrixView matrix = matrix_.view();
    const RowForms forms = kernels_.forms_for(matrix.type);
    const Buffer<std::byte> rounded(forms.any() ? RoundedRows::bytes(matrix.num_inputs, num_rows) : 0);
    const LinearInput from = {input, {rounded.data(), num_rows}};
    const LinearPieces pieces(matrix, num_rows, team_.size());
    team_.run([&kernels = kernels_, matrix, forms, from, output, pieces, activation](ThreadTeam::Member& member) {
        if (forms.any()) {
            for_rows(member, from.rounded.num_rows,
                     [&](int row) { kernels.round_row(from, forms, matrix.num_inputs, row); });
        }
        member.for_pieces(pieces.count(), [&](int piece) {
            const LinearTile tile = pieces.tile(piece);
            kernels.linear(matrix, from, output, tile, false);
            if (!activation) return;
            for (int row = tile.first_row; row < tile.first_row + tile.num_rows; ++row) {
                kernels.activate(output.row(row) + tile.first_panel * kPanelWidth, tile.num_panels * kPanelWidth,
                                 *activation);
            }
        });
    });
    team_.quiesce();  // a late member still reads the rounded rows
}

}  // namespace quire
