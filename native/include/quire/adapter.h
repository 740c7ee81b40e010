// A LoRA adapter: two small matrices, A and B, for some of the matrices W of a decoder. A row of the adapter gets
//
//     output = W x + B (scale * (A x))
//
// W stays as it is. So a step may have rows of many adapters, and a row without one has the bits that it always has.
#pragma once

#include <array>
#include <vector>

#include "quire/decoder.h"

namespace quire {

// The matrices of a layer that can have an adapter.
enum class Adapted { kQuery, kKey, kValue, kOutput, kGate, kUp, kDown };
constexpr int kNumAdapted = 7;

struct LowRank {
    PackedMatrix a, b;
    float scale = 1.0F;

    bool empty() const { return a.empty(); }
};

class Adapter {
  public:
    // The decoder must outlive it.
    explicit Adapter(const Decoder& decoder);
    Adapter(const Adapter&) = delete;
    Adapter& operator=(const Adapter&) = delete;

    // Packs A, [rank, in], and B, [out, rank]; the rank is a multiple of 16. Uses the calling thread only, so that
    // steps may run meanwhile. Throws std::invalid_argument if they do not fit the matrix of the decoder.
    void set(int layer, Adapted which, const MatrixRows& a, const MatrixRows& b, float scale);

    const Decoder& decoder() const { return decoder_; }
    const LowRank& at(int layer, Adapted which) const { return layers_[layer][static_cast<int>(which)]; }
    NumberType number_type() const { return number_type_; }
    std::size_t num_bytes() const;

  private:
    const Decoder& decoder_;
    NumberType number_type_ = NumberType::kFloat32;
    Arena memory_;
    std::vector<std::array<LowRank, kNumAdapted>> layers_;
};

}  // namespace quire
