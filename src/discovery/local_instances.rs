//! Instances whose activities this process has or is about to take: little is to be learnt of them elsewhere.

use crate::model::Partition;
use dashmap::DashMap;
use std::sync::Arc;

/// How many activities of each instance are here.
#[derive(Clone, Default)]
pub(crate) struct Here(Arc<DashMap<Partition, usize>>);

/// One of them, until it is dropped.
pub(crate) struct LocalActivity {
    here: Here,
    partition: Partition,
}

impl Here {
    pub(crate) fn place(&self, partition: &Partition) -> LocalActivity {
        *self.0.entry(partition.clone()).or_default() += 1;
        LocalActivity { here: self.clone(), partition: partition.clone() }
    }

    pub(crate) fn has(&self, partition: &Partition) -> bool {
        self.0.contains_key(partition)
    }
}

impl Drop for LocalActivity {
    fn drop(&mut self) {
        self.here.0.remove_if_mut(&self.partition, |_, count| {
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
    fn an_instance_is_here_until_its_last_activity_is_gone() {
        let (here, partition) = (Here::default(), Partition::instance("a").unwrap());
        let (first, second) = (here.place(&partition), here.place(&partition));
        drop(first);
        assert!(here.has(&partition));
        drop(second);
        assert!(!here.has(&partition));
        assert!(here.0.is_empty());
    }
}
