//! Slot leases: which slots each worker polls first.

use super::SlotRange;
use std::fmt::Debug;

/// The position of a worker among the workers that take the same work from the same queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberPosition {
    /// The number of workers before it, in the order of their names.
    pub position: usize,
    /// The number of all workers, including this one.
    pub members: usize,
}

impl MemberPosition {
    /// The worker at `position` among `members` workers.
    pub fn new(position: usize, members: usize) -> Self {
        Self { position, members }
    }
}

/// Assigns slots to a worker. A worker polls its own slots first.
///
/// The default, [`EqualShares`], divides all slots equally among the workers. An application that knows its own
/// sharding can assign slots itself, for example by the ordinal of each replica.
/// [`Slot::of_instance`](crate::Slot::of_instance) returns the slot of an instance.
///
/// The provider calls it on a separate thread. If a call panics or takes longer than half a second, the provider uses
/// the previous result, or [`EqualShares`] before the first result. It logs a warning once a minute.
///
/// ```
/// use duroxide_cosmos::{CosmosDBProviderConfig, LeaseProvider, MemberPosition, SlotRange};
///
/// /// A replica of a stateful set, which knows the number of replicas.
/// #[derive(Debug)]
/// struct Replica {
///     ordinal: usize,
///     replicas: usize,
/// }
///
/// impl LeaseProvider for Replica {
///     fn slots(&self, _position: MemberPosition) -> SlotRange {
///         SlotRange::part(self.ordinal, self.replicas)
///     }
/// }
///
/// let config = CosmosDBProviderConfig::default().with_leases(Replica { ordinal: 2, replicas: 4 });
/// ```
pub trait LeaseProvider: Debug + Send + Sync {
    /// The slots of this worker. The provider calls it whenever it has read the list of workers.
    fn slots(&self, position: MemberPosition) -> SlotRange;
}

/// Divides the slots equally among the workers.
#[derive(Clone, Copy, Debug, Default)]
pub struct EqualShares;

impl LeaseProvider for EqualShares {
    fn slots(&self, position: MemberPosition) -> SlotRange {
        SlotRange::part(position.position, position.members)
    }
}
