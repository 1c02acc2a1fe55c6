//! A short memory of messages that turns of this process hold or have just consumed. A poll may still return them.

use super::memory::Memory;
use crate::model::{DocumentId, Millis, Partition};
use std::sync::{Mutex, PoisonError};

/// What was consumed is not in the queue any more, and a look that began before that may return it for so long. What is seen
/// later is there: a copy that a repeated request has written.
const ECHO: Millis = 30_000;

type MessageKey = (Partition, DocumentId);

/// The last messages that were taken, each until when it is not news.
#[derive(Default)]
pub(super) struct Recent(Mutex<Memory<MessageKey, TakenMessage>>);

/// What is known of a message.
#[derive(Clone, Copy, Default)]
struct TakenMessage {
    /// Until when it is not news.
    until: Millis,
    consumed: bool,
}

impl Recent {
    fn lock(&self) -> std::sync::MutexGuard<'_, Memory<MessageKey, TakenMessage>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn has them until then.
    pub(super) fn taken<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>, until: Millis) {
        self.note(partition, ids, TakenMessage { until, consumed: false });
    }

    fn note<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>, taken: TakenMessage) {
        let mut memory = self.lock();
        for id in ids {
            // What is consumed stays consumed.
            memory.note((partition.clone(), id.clone()), |known| *known = if known.consumed { *known } else { taken });
        }
    }

    /// They will not come back.
    pub(super) fn consumed<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>, now: Millis) {
        self.note(partition, ids, TakenMessage { until: now + ECHO, consumed: true });
    }

    /// They are in the queue again.
    pub(super) fn returned<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>) {
        self.taken(partition, ids, 0);
    }

    /// Whether it is no news that this message is in the queue.
    pub(super) fn is_taken(&self, partition: &Partition, id: &DocumentId, now: Millis) -> bool {
        self.known(partition, id).until > now
    }

    /// Whether it is not in the queue any more.
    pub(super) fn is_consumed(&self, partition: &Partition, id: &DocumentId) -> bool {
        self.known(partition, id).consumed
    }

    fn known(&self, partition: &Partition, id: &DocumentId) -> TakenMessage {
        self.lock().get(&(partition.clone(), id.clone())).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::memory::LIMIT, *};

    #[test]
    fn it_remembers_the_last_and_forgets_the_first() {
        let recent = Recent::default();
        let partition = Partition::instance("a").unwrap();
        let ids: Vec<DocumentId> = (0..=LIMIT).map(|n| DocumentId::new("m", &[&n.to_string()])).collect();
        recent.consumed(&partition, ids.iter(), 0);
        assert!(!recent.is_consumed(&partition, &ids[0]));
        assert!(recent.is_consumed(&partition, &ids[1]) && recent.is_consumed(&partition, &ids[LIMIT]));
    }

    #[test]
    fn what_a_turn_holds_is_news_again_when_its_lock_expires_or_it_gives_it_back() {
        let recent = Recent::default();
        let partition = Partition::instance("a").unwrap();
        let ids = [DocumentId::new("m", &["1"]), DocumentId::new("m", &["2"])];
        recent.taken(&partition, ids.iter(), 100);
        assert!(recent.is_taken(&partition, &ids[0], 99) && !recent.is_taken(&partition, &ids[0], 100));
        assert!(!recent.is_consumed(&partition, &ids[0]));
        recent.returned(&partition, ids[1..].iter());
        assert!(!recent.is_taken(&partition, &ids[1], 99));
        recent.consumed(&partition, ids[..1].iter(), 100);
        recent.returned(&partition, ids[..1].iter());
        assert!(recent.is_consumed(&partition, &ids[0]));
        assert!(recent.is_taken(&partition, &ids[0], 99 + ECHO), "a look may still return it");
        assert!(!recent.is_taken(&partition, &ids[0], 100 + ECHO), "what is seen now is a copy");
    }
}
