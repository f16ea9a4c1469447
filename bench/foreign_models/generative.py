"""Models that make images or learn of them without labels, in linen and nnx."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from bench.foreign_models.training import BATCH, Foreign, State, linen_state, normal, optimizer, trained, trained_nnx


def timestep_embedding(t: jax.Array, dim: int) -> jax.Array:
    half = dim // 2
    freqs = jnp.exp(-np.log(10000.0) * jnp.arange(half) / half)
    args = t[:, None].astype(jnp.float32) * freqs[None]
    return jnp.concatenate([jnp.cos(args), jnp.sin(args)], axis=-1)


class ResBlock(nnx.Module):
    def __init__(self, in_ch: int, out_ch: int, emb_dim: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.GroupNorm(in_ch, 4, rngs=rngs), nnx.GroupNorm(out_ch, 4, rngs=rngs)
        self.conv1 = nnx.Conv(in_ch, out_ch, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(out_ch, out_ch, (3, 3), rngs=rngs)
        self.emb = nnx.Linear(emb_dim, out_ch, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.skip = nnx.Conv(in_ch, out_ch, (1, 1), rngs=rngs) if in_ch != out_ch else None

    def __call__(self, x: jax.Array, emb: jax.Array) -> jax.Array:
        h = self.conv1(nnx.silu(self.norm1(x)))
        h = h + self.emb(nnx.silu(emb))[:, None, None, :]
        h = self.conv2(self.dropout(nnx.silu(self.norm2(h))))
        return h + (x if self.skip is None else self.skip(x))


class SelfAttention2d(nnx.Module):
    def __init__(self, ch: int, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(ch, 4, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, ch, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        return x + self.attn(self.norm(x).reshape(b, h * w, c)).reshape(b, h, w, c)


class DDPM(nnx.Module):
    """Levels down and up again, and every activation of the way down goes across."""

    def __init__(self, rngs: nnx.Rngs):
        self.rngs, (ch, emb) = rngs, (8, 16)
        self.alpha_bar = jnp.cumprod(1.0 - jnp.linspace(1e-4, 0.02, 100))
        self.time_mlp = nnx.Sequential(nnx.Linear(8, emb, rngs=rngs), nnx.silu, nnx.Linear(emb, emb, rngs=rngs))
        self.conv_in = nnx.Conv(3, ch, (3, 3), rngs=rngs)
        self.down = nnx.List([ResBlock(ch, ch, emb, rngs), ResBlock(ch, 2 * ch, emb, rngs)])
        self.downsample = nnx.Conv(ch, ch, (3, 3), strides=2, rngs=rngs)
        self.mid = nnx.List([ResBlock(2 * ch, 2 * ch, emb, rngs), ResBlock(2 * ch, 2 * ch, emb, rngs)])
        self.mid_attn = SelfAttention2d(2 * ch, rngs)
        self.up = nnx.List([ResBlock(4 * ch, 2 * ch, emb, rngs), ResBlock(3 * ch, ch, emb, rngs)])
        self.upsample = nnx.ConvTranspose(2 * ch, 2 * ch, (2, 2), strides=2, rngs=rngs)
        self.norm_out, self.conv_out = nnx.GroupNorm(ch, 4, rngs=rngs), nnx.Conv(ch, 3, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:  # b h w c, b -> b h w c
        emb = self.time_mlp(timestep_embedding(t, 8))
        x = self.conv_in(x)
        skips = []
        for i, block in enumerate(self.down):
            x = block(x, emb)
            skips.append(x)
            if i == 0:
                x = self.downsample(x)
        x = self.mid[1](self.mid_attn(self.mid[0](x, emb)), emb)
        for i, block in enumerate(self.up):
            x = block(jnp.concatenate([x, skips.pop()], axis=-1), emb)
            if i == 0:
                x = self.upsample(x)
        return self.conv_out(nnx.silu(self.norm_out(x)))


def ddpm() -> Foreign:
    def loss(model: DDPM, images: jax.Array) -> jax.Array:
        t = jax.random.randint(model.rngs.noise(), (images.shape[0],), 0, 100)
        noise = jax.random.normal(model.rngs.noise(), images.shape)
        a = model.alpha_bar[t][:, None, None, None]
        predicted = model(jnp.sqrt(a) * images + jnp.sqrt(1 - a) * noise, t)
        return jnp.mean(jnp.square(predicted - noise))

    return trained_nnx(loss, DDPM, normal(BATCH, 8, 8, 3))


class EncoderBlock(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, y)
        y = nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


def patchify(images: jax.Array, p: int) -> jax.Array:
    b, h, w, c = images.shape
    x = images.reshape(b, h // p, p, w // p, p, c)
    return jnp.einsum("bhpwqc->bhwpqc", x).reshape(b, (h // p) * (w // p), p * p * c)


class MaskedAutoencoder(nn.Module):
    """Sees a quarter of the patches, in an order that is drawn for each image, and says the others."""

    patch: int = 4
    mask_ratio: float = 0.75

    def random_masking(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        b, n, _ = x.shape
        keep = int(n * (1 - self.mask_ratio))
        noise = jax.random.uniform(self.make_rng("dropout"), (b, n))
        ids_shuffle = jnp.argsort(noise, axis=1)
        ids_restore = jnp.argsort(ids_shuffle, axis=1)
        x_masked = jnp.take_along_axis(x, ids_shuffle[:, :keep, None], axis=1)
        mask = jnp.ones((b, n)).at[:, :keep].set(0)
        return x_masked, jnp.take_along_axis(mask, ids_restore, axis=1), ids_restore

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:  # b h w c -> ()
        target = patchify(images, self.patch)
        n = target.shape[1]
        x = nn.Dense(16, name="patch_embed")(target) + self.param("pos", nn.initializers.normal(0.02), (1, n, 16))
        x, mask, ids_restore = self.random_masking(x)
        for _ in range(2):
            x = EncoderBlock(4)(x)
        x = nn.Dense(8, name="decoder_embed")(nn.LayerNorm()(x))
        token = self.param("mask_token", nn.initializers.normal(0.02), (1, 1, 8))
        hidden = jnp.tile(token, (x.shape[0], n - x.shape[1], 1))
        x = jnp.take_along_axis(jnp.concatenate([x, hidden], axis=1), ids_restore[..., None], axis=1)
        x = x + self.param("decoder_pos", nn.initializers.normal(0.02), (1, n, 8))
        x = nn.Dense(target.shape[-1], name="decoder_pred")(nn.LayerNorm()(EncoderBlock(2)(x)))
        per_patch = jnp.mean((x - target) ** 2, axis=-1)
        return jnp.sum(per_patch * mask) / jnp.sum(mask)


def mae() -> Foreign:
    batch = {"image": normal(BATCH, 16, 16, 3)}

    def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
        return state.apply_fn({"params": params}, batch["image"], rngs={"dropout": key}), {}

    return trained(loss, linen_state(MaskedAutoencoder(), batch["image"]), batch)


class AffineCoupling(nnx.Module):
    """One half moves the other, by turns."""

    def __init__(self, dim: int, flip: bool, rngs: nnx.Rngs):
        self.flip, half = flip, dim // 2
        self.net = nnx.Sequential(
            nnx.Linear(half, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 32, rngs=rngs), nnx.relu,
            nnx.Linear(32, dim, rngs=rngs),
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:  # b d -> b d, b
        x1, x2 = jnp.split(x, 2, axis=-1)
        if self.flip:
            x1, x2 = x2, x1
        shift, log_scale = jnp.split(self.net(x1), 2, axis=-1)
        log_scale = jnp.tanh(log_scale)
        y2 = x2 * jnp.exp(log_scale) + shift
        y = jnp.concatenate([y2, x1] if self.flip else [x1, y2], axis=-1)
        return y, log_scale.sum(axis=-1)


class InvertibleLinear(nnx.Module):
    def __init__(self, dim: int, rngs: nnx.Rngs):
        self.weight = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (dim, dim)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ self.weight[...], jnp.linalg.slogdet(self.weight[...])[1]


class RealNVP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.couplings = nnx.List([AffineCoupling(8, i % 2 == 1, rngs) for i in range(4)])
        self.mixers = nnx.List([InvertibleLinear(8, rngs) for _ in range(4)]) if self.mixed else None
        self.log_scale = nnx.Param(jnp.zeros(8))

    mixed = False

    def log_prob(self, x: jax.Array) -> jax.Array:  # b d -> b
        log_det = jnp.zeros(x.shape[0])
        for i, coupling in enumerate(self.couplings):
            x, ldj = coupling(x)
            log_det = log_det + ldj
            if self.mixers is not None:
                x, ldj = self.mixers[i](x)
                log_det = log_det + ldj
        z = x * jnp.exp(-self.log_scale)
        base = -0.5 * jnp.sum(z**2 + jnp.log(2 * jnp.pi), axis=-1) - jnp.sum(self.log_scale[...])
        return base + log_det


class Glow(RealNVP):
    """With matrices between the couplings, whose determinants count."""

    mixed = True


def flow(make: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[], Foreign]:
    def loss(model: Any, batch: jax.Array) -> jax.Array:
        return -model.log_prob(batch).mean()

    return lambda: trained_nnx(loss, make, 0.5 * normal(BATCH, 8))


class VectorQuantizer(nn.Module):
    """The nearest of some vectors; with ``decay`` these follow what is near them, else a loss pulls them."""

    num_embeddings: int = 16
    dim: int = 8
    decay: float | None = None

    @nn.compact
    def __call__(self, z: jax.Array, train: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:  # b h w d
        shape, init = (self.num_embeddings, self.dim), nn.initializers.normal(1.0)
        if self.decay is None:
            codebook = self.param("codebook", init, shape)
        else:
            average = self.variable("vq", "average", lambda: init(self.make_rng("params"), shape))
            count = self.variable("vq", "count", jnp.ones, (self.num_embeddings,))
            codebook = average.value / (count.value[:, None] + 1e-5)
        flat = z.reshape(-1, self.dim)
        distances = (flat**2).sum(1, keepdims=True) - 2 * flat @ codebook.T + (codebook**2).sum(1)
        indices = jnp.argmin(distances, axis=1)
        quantized = codebook[indices].reshape(z.shape)
        loss = 0.25 * jnp.mean((jax.lax.stop_gradient(quantized) - z) ** 2)
        if self.decay is None:
            loss = loss + jnp.mean((quantized - jax.lax.stop_gradient(z)) ** 2)
        elif train and not self.is_initializing():
            one_hot = jax.nn.one_hot(indices, self.num_embeddings)
            count.value = self.decay * count.value + (1 - self.decay) * one_hot.sum(axis=0)
            moved = one_hot.T @ jax.lax.stop_gradient(flat)
            average.value = self.decay * average.value + (1 - self.decay) * moved
        usage = jax.nn.one_hot(indices, self.num_embeddings).mean(axis=0)
        perplexity = jnp.exp(-jnp.sum(usage * jnp.log(usage + 1e-10)))
        return z + jax.lax.stop_gradient(quantized - z), loss, perplexity


class VqVae(nn.Module):
    decay: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        h = nn.relu(nn.Conv(16, (4, 4), strides=(2, 2), name="enc_1")(x))
        h = nn.Conv(8, (3, 3), name="enc_2")(h)
        z, vq_loss, perplexity = VectorQuantizer(decay=self.decay)(h)
        h = nn.relu(nn.Conv(16, (3, 3), name="dec_1")(z))
        return nn.ConvTranspose(3, (4, 4), strides=(2, 2), name="dec_2")(h), vq_loss, perplexity


def vq_vae(decay: float | None) -> Callable[[], Foreign]:
    def made() -> Foreign:
        batch = {"image": normal(BATCH, 8, 8, 3)}

        def loss(state: State, params: Any, batch: Any, key: jax.Array) -> Any:
            variables = {"params": params, **state.rest}
            (out, vq_loss, _), moved = state.apply_fn(variables, batch["image"], mutable=["vq"])
            return jnp.mean((out - batch["image"]) ** 2) + vq_loss, moved

        return trained(loss, linen_state(VqVae(decay), batch["image"]), batch)

    return made


class Projector(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(nn.relu(nn.LayerNorm()(nn.Dense(32)(x))))


class Byol(nn.Module):
    """An encoder and its projection; a prediction on top of it for the student alone."""

    def setup(self) -> None:
        self.convs = [nn.Conv(8, (3, 3), strides=(2, 2)), nn.Conv(16, (3, 3), strides=(2, 2))]
        self.projector, self.predictor = Projector(), Projector()

    def project(self, x: jax.Array) -> jax.Array:
        for conv in self.convs:
            x = nn.relu(conv(x))
        return self.projector(x.mean(axis=(1, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.predictor(self.project(x))


class ByolState(State):
    target_params: Any = None


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Each image flipped or not, brighter or darker, with noise."""
    flip, bright, noise = jax.random.split(key, 3)
    flipped = jax.random.bernoulli(flip, 0.5, (images.shape[0], 1, 1, 1))
    images = jnp.where(flipped, images[:, :, ::-1], images)
    images = images * jax.random.uniform(bright, (images.shape[0], 1, 1, 1), minval=0.6, maxval=1.4)
    return images + 0.1 * jax.random.normal(noise, images.shape)


def regression_loss(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (x, y))
    return 2 - 2 * jnp.sum(x * y, axis=-1)


def byol() -> Foreign:
    """Both views in one batch through the student, and the teacher follows it."""
    batch = {"image": normal(BATCH, 8, 8, 3)}
    model = Byol()
    params = jax.jit(model.init)(jax.random.key(0), batch["image"])["params"]
    teacher = jax.jit(model.init)(jax.random.key(5), batch["image"])["params"]
    state = ByolState.create(
        apply_fn=model.apply, params=params, target_params=teacher, tx=optimizer(), key=jax.random.key(2)
    )

    def step(by: Any) -> Callable[..., Any]:
        def train_step(state: ByolState, batch: Any) -> Any:
            k1, k2 = jax.random.split(jax.random.fold_in(state.key, state.step))
            views = jnp.concatenate([augment(k1, batch["image"]), augment(k2, batch["image"])])

            def loss_fn(params: Any) -> jax.Array:
                p1, p2 = jnp.split(state.apply_fn({"params": params}, views), 2)
                targets = state.apply_fn({"params": state.target_params}, views, method="project")
                t1, t2 = jnp.split(jax.lax.stop_gradient(targets), 2)
                return jnp.mean(regression_loss(p1, t2) + regression_loss(p2, t1))

            loss, grads = by.value_and_grad(loss_fn)(state.params)
            state = state.apply_gradients(grads=grads)
            moved = optax.incremental_update(state.params, state.target_params, 0.01)
            return state.replace(target_params=moved), {"loss": loss}

        return train_step

    return Foreign(
        step,
        arguments=lambda: (state, batch),
        following=lambda given, result: (result[0], *given[1:]),
        state=lambda given: (given[0].params, given[0].opt_state, given[0].target_params),
        jit=jax.jit,
    )


MODELS: dict[str, Callable[[], Foreign]] = {
    "nnx ddpm unet": ddpm,
    "linen masked autoencoder": mae,
    "nnx realnvp": flow(RealNVP),
    "nnx glow": flow(Glow),
    "linen vq-vae": vq_vae(None),
    "linen vq-vae, moving averages": vq_vae(0.9),
    "linen byol": byol,
}
