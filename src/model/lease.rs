//! Slot leases: which slots each worker polls first.

use super::SlotRange;
use std::fmt::Debug;

/// Where a process stands among those that take the same things from the same queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberPosition {
    /// How many come before it, in the order of their names.
    pub position: usize,
    /// How many there are, with it.
    pub members: usize,
}

impl MemberPosition {
    /// The place at `position` among so many.
    pub fn new(position: usize, members: usize) -> Self {
        Self { position, members }
    }
}

/// Says which slots a process looks after.
///
/// The default, [`EqualShares`], cuts all slots into as many parts as there are members. An application that knows its own
/// sharding, such as one whose replicas each have an ordinal, can say it better. Slots of an instance are told by
/// [`Slot::of_instance`](crate::Slot::of_instance).
///
/// It is called on a thread of its own. While a call panics or takes longer than half a second, the provider keeps the last answer,
/// or takes that of [`EqualShares`] before the first, and logs a warning once a minute.
///
/// ```
/// use duroxide_cosmos::{CosmosDBProviderConfig, LeaseProvider, MemberPosition, SlotRange};
///
/// /// A replica of a stateful set, which knows how many there are without asking.
/// #[derive(Debug)]
/// struct Replica {
///     ordinal: usize,
///     replicas: usize,
/// }
///
/// impl LeaseProvider for Replica {
///     fn slots(&self, _place: MemberPosition) -> SlotRange {
///         SlotRange::part(self.ordinal, self.replicas)
///     }
/// }
///
/// let config = CosmosDBProviderConfig::default().with_leases(Replica { ordinal: 2, replicas: 4 });
/// ```
pub trait LeaseProvider: Debug + Send + Sync {
    /// The slots that this process looks after, asked again whenever the list of members was read.
    fn slots(&self, place: MemberPosition) -> SlotRange;
}

/// The same share for each member.
#[derive(Clone, Copy, Debug, Default)]
pub struct EqualShares;

impl LeaseProvider for EqualShares {
    fn slots(&self, place: MemberPosition) -> SlotRange {
        SlotRange::part(place.position, place.members)
    }
}
