//! The documents, the examples, the deployment templates and the layers match the code.

mod architecture;
mod deployment;
mod examples;
mod names;
