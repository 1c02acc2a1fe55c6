//! Instances of which this process holds activities or has candidates. Other processes hardly know more about them.

use crate::model::Partition;
use dashmap::DashMap;
use std::sync::Arc;

/// The number of local activities of each instance.
#[derive(Clone, Default)]
pub(crate) struct LocalInstances(Arc<DashMap<Partition, usize>>);

/// One local activity. It counts until this is dropped.
pub(crate) struct LocalActivity {
    instances: LocalInstances,
    partition: Partition,
}

impl LocalInstances {
    pub(crate) fn add(&self, partition: &Partition) -> LocalActivity {
        *self.0.entry(partition.clone()).or_default() += 1;
        LocalActivity { instances: self.clone(), partition: partition.clone() }
    }

    pub(crate) fn has(&self, partition: &Partition) -> bool {
        self.0.contains_key(partition)
    }
}

impl Drop for LocalActivity {
    fn drop(&mut self) {
        self.instances.0.remove_if_mut(&self.partition, |_, count| {
            *count -= 1;
            *count == 0
        });
    }
}

impl std::fmt::Debug for LocalActivity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalActivity({:?})", self.partition)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_local_until_its_last_activity_is_dropped() {
        let (instances, partition) = (LocalInstances::default(), Partition::instance("a").unwrap());
        let (first, second) = (instances.add(&partition), instances.add(&partition));
        drop(first);
        assert!(instances.has(&partition));
        drop(second);
        assert!(!instances.has(&partition));
        assert!(instances.0.is_empty());
    }
}
