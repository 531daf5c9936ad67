/* What a compiled kernel calls when a CUDA call fails. The DSL's own runtime library (44 MB) would bring it; with this
 * and the DSL's small static library a kernel is a shared object that tvm-ffi loads by itself. */
extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);
extern const char *cudaGetErrorName(int);
extern const char *cudaGetErrorString(int);
extern int snprintf(char *, unsigned long, const char *, ...);

void CuteDSLRT_TVMFFISetRaisedCudaError(void *set_raised_from_parts, int code) {
    char message[256];
    (void)set_raised_from_parts;
    snprintf(message, sizeof message, "CUDA error %d %s: %s", code, cudaGetErrorName(code), cudaGetErrorString(code));
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
}
