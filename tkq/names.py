"""Names of tkq's modules: what ``dir`` lists, and what an unknown name may have meant.

A module that loads its names on first use (PEP 562) has ``__getattr__`` raise ``unknown(..)`` and ``__dir__`` return
``listed(..)``. Neither imports anything.
"""
from __future__ import annotations

import difflib

# What torch, flash-attn, QuACK, Liger, vLLM and transformers call a function of tkq, as `_plain` writes it.
_ELSEWHERE = {
    "flash_attn": "flashattention flashattnfunc scaleddotproductattention sdpa multiheadattention mha "
                  "flashattnqkvpackedfunc flashattnkvpackedfunc flashattnforward",
    "flash_attn_fp8": "fp8attention fp8attn fp8flashattn sageattn sageattention float8attention",
    "flash_attn_fp8_varlen": "fp8attentionvarlen fp8attnvarlen fp8varlenattention fp8flashattnvarlen sageattnvarlen",
    "flex_attention": "flexattn flex scoremod maskmod",
    "create_block_mask": "blockmask createmask",
    "flash_attn_varlen": "flashattnvarlenfunc flashattnvarlenqkvpackedfunc varlenattn varlenattention "
                         "flashattentionvarlen",
    "linear_attn": "linearattention chunksimplegla simplegla chunklinearattn lightningattn chunklightningattn "
                   "retention chunkretention gla chunkgla gatedlinearattention",
    "gated_delta_rule": "chunkgateddeltarule gateddeltanet gdn deltarule chunkdeltarule deltanet gateddelta "
                        "chunkgateddeltaruleprefill kda chunkkda kimideltaattention",
    "hedgehog": "lolcats hedgehogattention slidingwindowlinearattention lolcatslinearattention",
    "mamba2_ssd": "mambachunkscancombined mambachunkscan ssd mamba2 mamba ssdchunkscan statespacedual",
    "based": "parallelbased fusedchunkbased chunkbased basedlinearattention taylorlinearattention",
    "causal_conv1d": "causalconv1dfn causalconv causalconv1dfunction shortconv depthwiseconv1d conv1d",
    "fft_conv": "flashfftconv longconv longconvolution hyenaconv fftconvref",
    "causal_conv1d_step": "causalconv1dupdate causalconv1dvarlenstates shortconvstep",
    "scan": "associativescan parallelscan selectivescan chunkhgrn fusedrecurrenthgrn hgrn linearrecurrence warpscan",
    "flash_attn_with_kvcache": "flashattnkvcache pagedattention pagedattn batchdecodewithpagedkvcache "
                               "singledecodewithkvcache fwdkvcache pagedattentionv1 pagedattentionv2",
    "mla_decode": "flashmlawithkvcache flashmla batchmlapagedattention cutlassmladecode mladecodewithkvcache "
                  "flashmlasparsefwd sparsemla deepseeksparseattention",
    "plan_decode": "getschedulermetadata getmlametadata planpagedattention",
    "kv_append": "reshapeandcache reshapeandcacheflash appendpagedkvcache updatekvcache",
    "cascade_attention": "multilevelcascadeattentionwrapper batchdecodewithsharedprefixpagedkvcachewrapper "
                         "sharedprefixattention hydragen usecascadeattention",
    "merge_state": "mergestates mergeattnstates mergestateinplace",
    "linear_attn_step": "fusedrecurrentsimplegla fusedrecurrentgla fusedrecurrentlinearattn lightningattndecode",
    "gated_delta_rule_step": "fusedrecurrentgateddeltarule fusedrecurrentdeltarule fusedrecurrentkda "
                             "gateddeltaruledecode fusedrecurrentgateddeltaruleupdate",
    "ssd_step": "selectivestateupdate selectivestateupdatefn mambastep ssdupdate",
    "layernorm": "layernormfn layernormfwd addlayernorm nativelayernorm",
    "rmsnorm": "rmsnormfn rmsnormfwd addrmsnorm fusedaddrmsnorm fusedrmsnorm",
    "softmax": "softmaxfwd",
    "cross_entropy": "nllloss crossentropyfwd crossentropyloss",
    "linear_cross_entropy": "fusedlinearcrossentropy chunkedlinearcrossentropy fusedlinearcrossentropyloss",
    "gemm": "matmul mm bmm addmm baddbmm linear einsum gemmact gemmadd gemmgated gemmdact",
    "integrations.scaled_mm": "scaledmm",
    "fp8_gemm": "fp8matmul fp8mm fp8linear gemmfp8 cutlassscaledmm w8a8gemm",
    "grouped_gemm": "groupedmm scaledgroupedmm groupgemm groupedmatmul moegemm gemmgrouped fusedmoe",
    "quantize_fp8": "quantize quantise quantisefp8 fp8quantize fp8quant scaledfp8quant castfp8 tofp8",
    "quantize_qkv": "quantiseqkv qkvquantize quantizekv perheadquant",
    "rope": "rotary rotaryemb applyrotary applyrotaryemb",
    "rope_qk": "applyrotarypos applyrotaryposemb rotaryposemb applyropeqk",
    "swiglu": "silumul siluandmul silu swiglumlp",
    "geglu": "gelumul geluandmul gelutanhandmul gelu geglumlp",
    "tune": "autotune",
    "prefetch": "warmup precompile",
}
_KNOWN = {word: name for name, words in _ELSEWHERE.items() for word in words.split()}
_CLASSES = ("BasedAttention", "CrossEntropyLoss", "Fp8Linear", "GEGLU", "GatedDeltaNet", "HedgehogAttention",
            "HyenaFilterConv", "KimiDeltaAttention", "LayerNorm", "LayerNormQuant", "Linear", "LinearCrossEntropyLoss",
            "LogSoftmax", "Mamba2", "RMSNorm", "RMSNormQuant", "RotaryEmbedding", "ShortConvolution", "Softmax",
            "SwiGLU")


def listed(namespace: dict, public) -> list[str]:
    """What ``dir`` of a module says: its public names, and those with two underscores that Python gives it."""
    return sorted({*public, *(name for name in namespace if name.startswith("__") and name.endswith("__"))})


def unknown(module: str, name: str, public) -> AttributeError:
    """The error for a name that a module has not, with what may have been meant. public: the module's names."""
    meant = None if name.startswith("__") else meaning(module, name, public)
    # With a name in the error, Python's traceback adds no second suggestion of its own.
    suggested = f"; did you mean {meant}?" if meant else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{suggested}", name=name, obj=None)


def meaning(module: str, name: str, public) -> str | None:
    """The full name of what was meant: written a little otherwise, or as other libraries call it. None: no idea."""
    if module == "tkq" and name in _CLASSES:
        return f"tkq.nn.{name}"
    plain, ours = _plain(name), {_plain(one): one for one in public if not one.startswith("_")}
    for word in (plain, plain.removeprefix("liger").removesuffix("function")):
        if word in ours:
            return f"{module}.{ours[word]}"
        if module == "tkq" and word in _KNOWN:
            return f"tkq.{_KNOWN[word]}"
    near = difflib.get_close_matches(plain, ours, 1, 0.75)
    return f"{module}.{ours[near[0]]}" if near else None


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
