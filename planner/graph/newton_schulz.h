#pragma once

namespace parplan {

// The iteration by which Muon makes all singular values of a matrix about 1 (Jordan et al. 2024,
// "Muon: An optimizer for hidden layers in neural networks"). Letters: X the matrix, divided by its
// Frobenius norm, with no more rows than columns (else it is transposed before, and back behind); I
// the identity. A step is
//     A = X X^T,   B = a I + b A + c A A,   X <- B X,
// so that each singular value s becomes a s + b s^3 + c s^5. They chose the coefficients so that
// small values grow as fast as possible: values end between about 0.7 and 1.2, and are not meant to
// become 1. torch.optim.Muon and Megatron-LM's "simple" coefficients are the same.
struct NewtonSchulz {
  double a, b, c;
};
inline constexpr NewtonSchulz newton_schulz{3.4445, -4.7750, 2.0315};
inline constexpr int newton_schulz_steps = 5;

// Matrices whose norm is smaller are divided by this instead (torch.optim.Muon's `eps`).
inline constexpr double least_matrix_norm = 1e-7;

}  // namespace parplan
