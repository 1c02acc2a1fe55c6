//! The store room against the local account.
