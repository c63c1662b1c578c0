"""Gaussian diffusion of latents: interpolant, conversions, deterministic steps, average velocity, re-noising.

t = 0 is data, t = 1 is noise; theta is the schedule's angle, alpha = cos(theta), sigma = sin(theta). Coefficients have
one number a sample and are broadcast over the latent's axes. "Angular" is the velocity in theta, `velocity` that in t.
Numbers refer to docs/math.md.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from diladiff.processes.latent_schedules import LatentSchedule

Latent = Float[Tensor, "B *S"]
PerSample = Float[Tensor, " B"]


def interpolate(z: Latent, eps: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """z_t = alpha z + sigma eps, docs/math.md (17)."""
    return _over(alpha_B, z) * z + _over(sigma_B, z) * eps


def angular_from_pair(z: Latent, eps: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """The conditional dz_t/dtheta = alpha eps - sigma z of one latent and its noise, docs/math.md (20)."""
    return _over(alpha_B, z) * eps - _over(sigma_B, z) * z


def noise_from_clean(z_t: Latent, clean: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """The eps of z_t = alpha clean + sigma eps, docs/math.md (20); needs sigma > 0."""
    return (z_t - _over(alpha_B, z_t) * clean) / _over(sigma_B, z_t)


def clean_from_noise(z_t: Latent, eps: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """The clean latent of z_t = alpha clean + sigma eps, docs/math.md (20); needs alpha > 0."""
    return (z_t - _over(sigma_B, z_t) * eps) / _over(alpha_B, z_t)


def angular_from_clean(z_t: Latent, clean: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """dz/dtheta = (alpha z_t - clean) / sigma, docs/math.md (20); needs sigma > 0."""
    return (_over(alpha_B, z_t) * z_t - clean) / _over(sigma_B, z_t)


def clean_from_angular(z_t: Latent, angular: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """alpha z_t - sigma dz/dtheta, docs/math.md (20); divides by nothing."""
    return _over(alpha_B, z_t) * z_t - _over(sigma_B, z_t) * angular


def angular_from_noise(z_t: Latent, eps: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """dz/dtheta = (eps - sigma z_t) / alpha, docs/math.md (20); needs alpha > 0."""
    return (eps - _over(sigma_B, z_t) * z_t) / _over(alpha_B, z_t)


def noise_from_angular(z_t: Latent, angular: Latent, alpha_B: PerSample, sigma_B: PerSample) -> Latent:
    """sigma z_t + alpha dz/dtheta, docs/math.md (20); divides by nothing."""
    return _over(sigma_B, z_t) * z_t + _over(alpha_B, z_t) * angular


def velocity_from_angular(angular: Latent, theta_prime_B: PerSample) -> Latent:
    """dz/dt = theta' dz/dtheta, docs/math.md (20)."""
    return _over(theta_prime_B, angular) * angular


def angular_from_velocity(velocity: Latent, theta_prime_B: PerSample) -> Latent:
    """dz/dtheta = dz/dt / theta', docs/math.md (20)."""
    return velocity / _over(theta_prime_B, velocity)


def velocity_from_clean(z_t: Latent, clean: Latent, t_B: PerSample, schedule: LatentSchedule) -> Latent:
    """dz/dt = theta' (alpha z_t - clean) / sigma, docs/math.md (20); needs t > 0.

    With a student's raw output for `clean` this is its average velocity in t, the literal form.
    """
    angular = angular_from_clean(z_t, clean, schedule.alpha(t_B), schedule.sigma(t_B))
    return velocity_from_angular(angular, schedule.theta_prime(t_B))


def phi(z_t: Latent, velocity: Latent, t_B: PerSample, schedule: LatentSchedule) -> Latent:
    """The paper's Phi, velocity in t to clean latent: alpha z_t - sigma velocity / theta', docs/math.md (21)."""
    angular = angular_from_velocity(velocity, schedule.theta_prime(t_B))
    return clean_from_angular(z_t, angular, schedule.alpha(t_B), schedule.sigma(t_B))


def ddim(z_t: Latent, clean: Latent, theta_t_B: PerSample, theta_s_B: PerSample) -> Latent:
    """cos(theta_s) clean + sin(theta_s) eps with the eps of `clean`, docs/math.md (22); exact for a constant `clean`.

    Written with one division, so that theta_s = 0 gives `clean`; needs theta_t > 0.
    """
    sin_t = torch.sin(theta_t_B)
    kept_B, turned_B = torch.sin(theta_s_B) / sin_t, torch.sin(theta_t_B - theta_s_B) / sin_t
    return _over(kept_B, z_t) * z_t + _over(turned_B, z_t) * clean


def jump(z_t: Latent, raw: Latent, theta_t_B: PerSample, theta_r_B: PerSample) -> Latent:
    """Where the student's angle form leads, z_t - (theta_t - theta_r) u: DDIM's step to `raw`, docs/math.md (26)."""
    return ddim(z_t, raw, theta_t_B, theta_r_B)


def average_velocity(z_t: Latent, raw: Latent, theta_t_B: PerSample, theta_r_B: PerSample) -> Latent:
    """u = (z_t - jump) / (theta_t - theta_r) from the student's raw output, docs/math.md (26).

    Written with sinc: at r = t it is the instantaneous velocity that `raw` means, and it can be differentiated there.
    Needs theta_t > 0.
    """
    delta_B = theta_t_B - theta_r_B
    sinc_B, half_B = torch.sinc(delta_B / math.pi), torch.sinc(delta_B / (2 * math.pi))
    sin_B, cos_B = torch.sin(theta_t_B), torch.cos(theta_t_B)
    return _over(delta_B / 2 * half_B.square() + cos_B / sin_B * sinc_B, z_t) * z_t - _over(sinc_B / sin_B, z_t) * raw


def meanflow_target(v: Latent, du: Latent, delta_B: PerSample, weight: float | Float[Tensor, ""]) -> Latent:
    """v - delta weight du, docs/math.md (27): du is the total derivative of u along (v, 1, 0), weight its warm-up.

    All of it in angle (delta = theta_t - theta_r) or all of it in t (delta = t - r).
    """
    return v - _over(delta_B * weight, v) * du


def renoise_angle(theta_s_B: PerSample, gamma: float) -> PerSample:
    """The angle to jump to before noise brings the state up to theta_s, docs/math.md (29)."""
    # sin(pi / 2 - theta): float32's cos(pi / 2) is negative, and atan2(0, negative) is pi.
    return torch.atan2(math.sqrt(1 - gamma**2) * torch.sin(theta_s_B), torch.sin(math.pi / 2 - theta_s_B))


def renoise(z: Latent, eps: Latent, theta_s_B: PerSample, gamma: float) -> Latent:
    """From `renoise_angle` to theta_s: c z + sin(theta_s) gamma eps, docs/math.md (29). Keeps the marginal."""
    noise_B = gamma * torch.sin(theta_s_B)
    # c^2 = cos^2 + (1 - gamma^2) sin^2: a sum, since 1 - gamma^2 sin^2 has no digits left near noise.
    kept_B = torch.hypot(torch.cos(theta_s_B), math.sqrt(1 - gamma**2) * torch.sin(theta_s_B))
    return _over(kept_B, z) * z + _over(noise_B, z) * eps


def renoise_as_listed(z: Latent, eps: Latent, gamma: float) -> Latent:
    """The paper's listing: sqrt(1 - gamma^2) z + gamma eps whatever the time, docs/math.md (30)."""
    return math.sqrt(1 - gamma**2) * z + gamma * eps


def _over(coefficient_B: Tensor, z: Tensor) -> Tensor:
    """One number a sample, shaped to multiply latents."""
    return coefficient_B.view(-1, *[1] * (z.ndim - 1))
