"""Weight offload for diffusion transformers: blocks stream from host memory to the device while others compute."""
