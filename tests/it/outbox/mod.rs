//! Messages from one instance to another.

mod delivery;
