//! How long what has ended is kept.

use std::time::Duration;

/// How long instances that have ended are kept, and how many executions of those that continue as new. Nothing is deleted by
/// default.
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
    /// How long instances are kept that have completed.
    pub fn with_completed(mut self, age: Duration) -> Self {
        self.completed = Some(age);
        self
    }

    /// How long instances are kept that have failed.
    pub fn with_failed(mut self, age: Duration) -> Self {
        self.failed = Some(age);
        self
    }

    /// How long instances are kept that were cancelled.
    pub fn with_cancelled(mut self, age: Duration) -> Self {
        self.cancelled = Some(age);
        self
    }

    /// How many executions of an instance are kept that continues as new, the current one included; half as many more, and ten, may be there
    /// before the old ones go. At least one.
    pub fn with_executions(mut self, count: u32) -> Self {
        self.executions = Some(count);
        self
    }

    /// How long instances are kept that have completed; for ever where nothing is said.
    pub fn completed(&self) -> Option<Duration> {
        self.completed
    }

    /// How long instances are kept that have failed.
    pub fn failed(&self) -> Option<Duration> {
        self.failed
    }

    /// How long instances are kept that were cancelled.
    pub fn cancelled(&self) -> Option<Duration> {
        self.cancelled
    }

    /// How many executions are kept; all where nothing is said.
    pub fn executions(&self) -> Option<u32> {
        self.executions
    }

    /// Whether instances go at all.
    pub(crate) fn takes_instances(&self) -> bool {
        self.completed.or(self.failed).or(self.cancelled).is_some()
    }

    /// Whether an execution with this number is one at which old ones go: not at each, since that takes a few requests.
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
    fn old_executions_go_now_and_then() {
        let retention = Retention::default().with_executions(4);
        let at: Vec<u64> = (1..50).filter(|execution| retention.prunes_at(*execution).is_some()).collect();
        assert_eq!(at, [16, 28, 40]);
        assert_eq!(Retention::default().with_executions(0).prunes_at(11), Some(1), "the current one stays");
        assert!((1..1_000).all(|execution| Retention::default().prunes_at(execution).is_none()));
    }

    #[test]
    fn nothing_goes_by_default() {
        assert!(!Retention::default().takes_instances());
        assert!(Retention::default().with_cancelled(Duration::ZERO).takes_instances());
    }
}
