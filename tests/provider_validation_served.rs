//! duroxide's validation suite over HTTP with an account key, on a container of four physical partitions.

mod validation;

validation_suite!(Account::Served(4));
