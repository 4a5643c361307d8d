// The members of struct DotKernels, in order.
{
  matmul_int, prepare_int, peak_int, peak_bytes, peak_float, dot_instruction
}
