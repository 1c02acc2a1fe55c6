//! duroxide's runtime on the provider: several processes, load and faults.

mod determinism;
mod instance_trees_under_faults;
mod several_providers;
mod stress;
