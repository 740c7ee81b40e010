// A LoRA adapter: two small matrices, A and B, for some of the matrices W of a decoder. A row of the adapter gets
//
//     output = W x + B (scale * (A x))
//
// W is not changed. So a step can have rows of many adapters, and a row without an adapter keeps its bits.
//
// With latents, the W of keys is never multiplied by a latent: a query q is multiplied by its transpose. The same
// holds for the adapter: a head of q gets A^T (scale * (B^T q)), where B has the rows of that head. Here B^T takes
// the place of A, and A^T that of B.
#pragma once

#include <array>
#include <vector>

#include "quire/decoder.h"

namespace quire {

// The matrices of a layer that can have an adapter. From kKeyUp on, there is one matrix for each head or expert.
enum class Adapted {
    kQuery,
    kKey,
    kValue,
    kOutput,
    kGate,
    kUp,
    kDown,
    kQueryDown,
    kLatent,
    kAttentionGate,  // also the gate of a recurrent layer, whose queries, keys, values and output have the usual names
    kDeltaRate,
    kDeltaDecay,
    kKeyUp,
    kValueUp,
    kExpertGate,
    kExpertUp,
    kExpertDown
};
constexpr int kNumAdapted = 17;

struct LowRank {
    MatrixView a, b;
    float scale = 1.0F;

    bool empty() const { return a.panels == nullptr; }
};

class Adapter {
  public:
    // The decoder must outlive it.
    explicit Adapter(const Decoder& decoder);
    Adapter(const Adapter&) = delete;
    Adapter& operator=(const Adapter&) = delete;

    // Packs A, [rank, in], and B, [out, rank], of a matrix; `index` is its head or expert; the rank is a multiple of
    // 16. Later heads can share a matrix of the first head: then theirs has no rows. Uses only the calling thread, so
    // that steps can run meanwhile. Throws std::invalid_argument if A and B do not fit the matrix of the decoder.
    void set(int layer, Adapted which, int index, const MatrixRows& a, const MatrixRows& b, float scale);

    const Decoder& decoder() const { return decoder_; }
    const LowRank& at(int layer, Adapted which, int index = 0) const {
        static const LowRank kNone;
        const std::vector<LowRank>& found = layers_[layer][static_cast<int>(which)];
        return index < static_cast<int>(found.size()) ? found[index] : kNone;
    }
    NumberType number_type() const { return number_type_; }

  private:
    MatrixView packed(const MatrixRows& rows);

    const Decoder& decoder_;
    NumberType number_type_ = NumberType::kFloat32;
    Arena memory_;
    std::vector<std::array<std::vector<LowRank>, kNumAdapted>> layers_;
};

}  // namespace quire
