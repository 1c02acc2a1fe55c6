//! The messages from outside that an execution has consumed. It keeps a few characters of each.

use super::{DocumentId, MessageDocument};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// Characters of a fingerprint: 48 bits of a random token. It is compared with the fingerprints of one instance only.
const LENGTH: usize = 12;

/// Fingerprints in the order in which their messages were consumed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Fingerprints(String);

impl Fingerprints {
    /// The fingerprints of the messages that came from outside. Other messages have none.
    pub(crate) fn of<'a>(ids: impl Iterator<Item = &'a DocumentId>) -> Self {
        Self(ids.filter_map(fingerprint).collect())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Approximate size in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn extend(&mut self, later: &Self) {
        self.0.push_str(&later.0);
    }

    /// The last `count` fingerprints.
    pub(crate) fn last(&self, count: usize) -> Self {
        let from = self.0.len().saturating_sub(count * LENGTH);
        Self(self.0.get(from..).unwrap_or_default().to_owned())
    }

    /// The messages of `ids` that were consumed before.
    pub(crate) fn consumed<'a>(&self, ids: impl Iterator<Item = &'a DocumentId>) -> Vec<DocumentId> {
        if self.is_empty() {
            return Vec::new();
        }
        let known: HashSet<&[u8]> = self.0.as_bytes().chunks(LENGTH).collect();
        ids.filter(|id| fingerprint(id).is_some_and(|fingerprint| known.contains(fingerprint.as_bytes())))
            .cloned()
            .collect()
    }
}

fn fingerprint(id: &DocumentId) -> Option<&str> {
    MessageDocument::outside_token(id)?.get(..LENGTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outside(token: &str) -> DocumentId {
        DocumentId::new("m", &[&MessageDocument::outside_key(token)])
    }

    #[test]
    fn only_messages_from_outside_are_recognised() {
        let ids =
            [outside("0123456789abcdef"), DocumentId::new("m", &["0123456789abcdef"]), outside("fedcba9876543210")];
        let fingerprints = Fingerprints::of(ids.iter());
        assert_eq!(fingerprints.bytes(), 2 * LENGTH);
        let asked =
            [outside("0123456789abffff"), outside("fedcba9876543210"), outside("ffffffffffffffff"), ids[1].clone()];
        assert_eq!(fingerprints.consumed(asked.iter()), asked[..2]);
    }

    #[test]
    fn the_last_fingerprints_keep_their_order() {
        let mut fingerprints = Fingerprints::of([outside("aaaaaaaaaaaa"), outside("bbbbbbbbbbbb")].iter());
        fingerprints.extend(&Fingerprints::of([outside("cccccccccccc")].iter()));
        assert_eq!(serde_json::to_string(&fingerprints.last(2)).unwrap(), "\"bbbbbbbbbbbbcccccccccccc\"");
        assert_eq!(fingerprints.last(9), fingerprints);
    }
}
