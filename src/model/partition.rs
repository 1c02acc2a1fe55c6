//! Partition key values: one for each instance and each session, and a few for the provider itself.
//!
//! Invariant: the mapping from instances, sessions and system documents to partition key values is injective. Values
//! that begin with `$` belong to the provider. An instance whose id begins with `$` is moved to `$i:`.

use super::id::digest;
use std::fmt;

/// Cosmos DB's limit for a partition key value, in bytes (with a version 2 partition key).
pub(crate) const MAX_BYTES: usize = 2_048;

/// The value of a partition key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub(crate) struct Partition(String);

/// An instance id that does not fit a partition key.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "the instance id has {bytes} bytes, but Cosmos DB takes at most {MAX_BYTES} in a partition key: choose a shorter id"
)]
pub(crate) struct InstanceIdTooLong {
    bytes: usize,
}

impl Partition {
    /// The partition of an instance: its history, messages, activities and values.
    pub(crate) fn instance(id: &str) -> Result<Self, InstanceIdTooLong> {
        let value = if id.starts_with('$') { format!("$i:{id}") } else { id.to_owned() };
        if value.len() > MAX_BYTES {
            return Err(InstanceIdTooLong { bytes: id.len() });
        }
        Ok(Self(value))
    }

    /// The partition of a session, which belongs to no instance. A digest replaces a long session id.
    pub(crate) fn session(id: &str) -> Self {
        if id.len() > 1_024 {
            return Self(format!("$h:{}", digest(id)));
        }
        Self(format!("$s:{id}"))
    }

    /// A partition for documents that belong to the container as a whole.
    pub(crate) fn system(name: &'static str) -> Self {
        Self(format!("$d:{name}"))
    }

    /// A partition for documents that a check of the account writes and deletes.
    pub(crate) fn scratch(name: &str) -> Self {
        Self(format!("$c:{name}"))
    }

    /// The partition of a worker's wake-up document.
    pub(crate) fn wakeup(member: &str) -> Self {
        Self(format!("$b:{member}"))
    }

    /// The instance of this partition. A partition of a session or of the provider has none.
    pub(crate) fn instance_id(&self) -> Option<&str> {
        if self.0.starts_with('$') {
            return self.0.strip_prefix("$i:");
        }
        Some(&self.0)
    }

    /// The value as Cosmos DB sees it.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&Partition> for azure_data_cosmos::PartitionKey {
    fn from(partition: &Partition) -> Self {
        Self::from(partition.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_instance_can_not_take_the_name_of_a_system_partition() {
        for name in ["$d:metrics", "$s:a", "$h:a", "$i:a", "$", "$$"] {
            let partition = Partition::instance(name).unwrap();
            assert_eq!(partition.instance_id(), Some(name));
            assert_ne!(partition.as_str(), name);
        }
        assert_eq!(Partition::session("a").instance_id(), None);
        assert_eq!(Partition::system("metrics").instance_id(), None);
    }

    #[test]
    fn an_instance_id_over_the_limit_is_refused_with_its_size() {
        assert!(Partition::instance(&"a".repeat(MAX_BYTES)).is_ok());
        let error = Partition::instance(&"a".repeat(MAX_BYTES + 1)).unwrap_err();
        assert!(error.to_string().contains("2049 bytes"), "{error}");
    }

    #[test]
    fn a_long_session_id_has_a_partition_of_its_own() {
        let (a, b) = ("s".repeat(10_240), "s".repeat(10_241));
        assert_ne!(Partition::session(&a), Partition::session(&b));
        assert!(Partition::session(&a).as_str().len() < MAX_BYTES);
    }

    proptest! {
        #[test]
        fn an_instance_comes_back_from_its_partition(id in any::<String>()) {
            let partition = Partition::instance(&id).unwrap();
            prop_assert_eq!(partition.instance_id(), Some(id.as_str()));
        }
    }
}
