cp .dev1/env.a /opt/env.a
timeout 30 python3 - <<'P'
import torch, subprocess
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
for _ in range(60): a @ a
print(subprocess.run("nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader", shell=True, capture_output=True, text=True).stdout.strip())
torch.cuda.synchronize()
P
