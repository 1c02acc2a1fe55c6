//! The retention of ended instances and of past executions.

use std::time::Duration;

/// How long ended instances stay, and how many executions stay of an instance that continues as new. By default the
/// provider deletes nothing.
///
/// ```
/// use duroxide_cosmos::Retention;
/// use std::time::Duration;
///
/// const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// let retention = Retention::default().with_completed(DAY * 7).with_failed(DAY * 90).with_executions(10);
/// assert_eq!(retention.cancelled(), None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    completed: Option<Duration>,
    failed: Option<Duration>,
    cancelled: Option<Duration>,
    executions: Option<u32>,
}

impl Retention {
    /// Sets how long completed instances stay.
    #[must_use]
    pub fn with_completed(mut self, age: Duration) -> Self {
        self.completed = Some(age);
        self
    }

    /// Sets how long failed instances stay.
    #[must_use]
    pub fn with_failed(mut self, age: Duration) -> Self {
        self.failed = Some(age);
        self
    }

    /// Sets how long cancelled instances stay.
    #[must_use]
    pub fn with_cancelled(mut self, age: Duration) -> Self {
        self.cancelled = Some(age);
        self
    }

    /// Sets how many executions stay of an instance that continues as new, including the current one. At least one
    /// stays.
    ///
    /// The provider prunes now and then: half as many executions more, plus ten, may exist before it does.
    #[must_use]
    pub fn with_executions(mut self, count: u32) -> Self {
        self.executions = Some(count);
        self
    }

    /// How long completed instances stay. `None` means for ever.
    pub fn completed(&self) -> Option<Duration> {
        self.completed
    }

    /// How long failed instances stay. `None` means for ever.
    pub fn failed(&self) -> Option<Duration> {
        self.failed
    }

    /// How long cancelled instances stay. `None` means for ever.
    pub fn cancelled(&self) -> Option<Duration> {
        self.cancelled
    }

    /// How many executions stay. `None` means all.
    pub fn executions(&self) -> Option<u32> {
        self.executions
    }

    /// Whether any instance expires.
    pub(crate) fn deletes_instances(&self) -> bool {
        self.completed.or(self.failed).or(self.cancelled).is_some()
    }

    /// The number of executions to keep, if the provider prunes at this execution. It does not prune at each one,
    /// because pruning takes a few requests.
    pub(crate) fn prunes_at(&self, execution: u64) -> Option<u32> {
        let keep = self.executions.map(|keep| keep.max(1))?;
        let every = u64::from(keep / 2 + 10);
        (execution > u64::from(keep) && (execution - u64::from(keep)).is_multiple_of(every)).then_some(keep)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_executions_are_pruned_now_and_then() {
        let retention = Retention::default().with_executions(4);
        let at: Vec<u64> = (1..50).filter(|execution| retention.prunes_at(*execution).is_some()).collect();
        assert_eq!(at, [16, 28, 40]);
        assert_eq!(Retention::default().with_executions(0).prunes_at(11), Some(1), "the current execution stays");
        assert!((1..1_000).all(|execution| Retention::default().prunes_at(execution).is_none()));
    }

    #[test]
    fn nothing_expires_by_default() {
        assert!(!Retention::default().deletes_instances());
        assert!(Retention::default().with_cancelled(Duration::ZERO).deletes_instances());
    }
}
