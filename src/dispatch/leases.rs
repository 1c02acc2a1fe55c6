//! Which slots a process looks after: a hint to where it looks first. What lies elsewhere is found by its own members, by a bell,
//! or by the sweep that everybody takes part in, so that no answer of a [`LeaseProvider`] can lose work or double it.

use crate::model::SlotRange;
use std::fmt::Debug;

/// Where a process stands among those that take the same things from the same queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// How many come before it, in the order of their names.
    pub position: usize,
    /// How many there are, with it.
    pub members: usize,
}

impl Place {
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
/// ```
/// use duroxide_cosmos::{CosmosDBProviderConfig, LeaseProvider, Place, SlotRange};
///
/// /// A replica of a stateful set, which knows how many there are without asking.
/// #[derive(Debug)]
/// struct Replica {
///     ordinal: usize,
///     replicas: usize,
/// }
///
/// impl LeaseProvider for Replica {
///     fn slots(&self, _place: Place) -> SlotRange {
///         SlotRange::part(self.ordinal, self.replicas)
///     }
/// }
///
/// let config = CosmosDBProviderConfig::default().with_leases(Replica { ordinal: 2, replicas: 4 });
/// ```
pub trait LeaseProvider: Debug + Send + Sync {
    /// The slots that this process looks after, asked again whenever the list of members was read.
    fn slots(&self, place: Place) -> SlotRange;
}

/// The same share for each member.
#[derive(Clone, Copy, Debug, Default)]
pub struct EqualShares;

impl LeaseProvider for EqualShares {
    fn slots(&self, place: Place) -> SlotRange {
        SlotRange::part(place.position, place.members)
    }
}
