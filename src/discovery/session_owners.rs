//! Sessions that other workers own, as far as claims have shown.
//!
//! Thousands of activities may wait for one session. One claim attempt informs all of them. The process forgets the
//! owner after a moment, because a session may be released long before its lock ends.

use super::ActivityCandidate;
use crate::model::Millis;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

/// A poll that shows an activity free is a reason to try its session again, but not more often than this.
const MOMENT: Millis = 1_000;
/// Where there are more, all are tried again.
const MOST: usize = 4_096;

/// The sessions by name.
#[derive(Default)]
pub(super) struct Held(Mutex<HashMap<String, KnownOwner>>);

struct KnownOwner {
    owner: String,
    until: Millis,
    /// When that was seen.
    seen: Millis,
}

impl Held {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, KnownOwner>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An attempt has seen who owns the session of an activity, and until when.
    pub(super) fn note(&self, candidate: &ActivityCandidate, owner: &str, until: Millis, now: Millis) {
        let Some(session) = &candidate.document.session_id else { return };
        let mut held = self.lock();
        if held.len() >= MOST {
            held.clear();
        }
        held.insert(session.clone(), KnownOwner { owner: owner.to_owned(), until, seen: now });
    }

    /// Who owns the session of an activity, if that is known to be another than `owner`.
    pub(super) fn by_another(&self, candidate: &ActivityCandidate, owner: Option<&str>, now: Millis) -> Option<String> {
        self.look(candidate, owner, now, ToOwned::to_owned)
    }

    /// What `look` says of the one who owns the session of an activity, if that is known to be another than `owner`: without a
    /// copy of its name, since thousands of activities may be looked at for every one that is taken.
    pub(super) fn look<R>(
        &self,
        candidate: &ActivityCandidate,
        owner: Option<&str>,
        now: Millis,
        look: impl FnOnce(&str) -> R,
    ) -> Option<R> {
        let (session, held) = (candidate.document.session_id.as_ref()?, self.lock());
        let hold = held.get(session).filter(|hold| hold.until > now)?;
        (owner != Some(hold.owner.as_str())).then(|| look(&hold.owner))
    }

    /// A poll shows an activity of this session free.
    pub(super) fn seen_free(&self, session: &str, now: Millis) {
        let mut held = self.lock();
        if held.get(session).is_some_and(|hold| hold.seen + MOMENT <= now) {
            held.remove(session);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::discovery::local_instances::LocalInstances;
    use crate::model::{ActivityDocument, DocumentId, Partition, Unknown};

    pub(in crate::discovery) fn work(session: Option<&str>) -> ActivityDocument {
        ActivityDocument {
            id: DocumentId::new("w", &["1"]),
            instance_id: Partition::instance("i").unwrap(),
            kind: crate::model::kind::ACTIVITY.to_owned(),
            due: 0,
            seq: "1".to_owned(),
            attempts: 0,
            session_id: session.map(ToOwned::to_owned),
            tag: None,
            slot: None,
            known_by: None,
            lock: None,
            item: None,
            etag: None,
            unknown: Unknown::default(),
        }
    }

    fn candidate(session: Option<&str>) -> ActivityCandidate {
        ActivityCandidate::new(work(session), &LocalInstances::default())
    }

    #[test]
    fn what_one_attempt_has_seen_holds_for_all_activities_of_the_session() {
        let held = Held::default();
        held.note(&candidate(Some("s")), "other", 5_000, 0);
        assert_eq!(held.by_another(&candidate(Some("s")), Some("me"), 1).as_deref(), Some("other"));
        assert_eq!(held.by_another(&candidate(Some("s")), Some("other"), 1), None, "its owner may");
        assert_eq!(held.by_another(&candidate(Some("t")), Some("me"), 1), None);
        assert_eq!(held.by_another(&candidate(None), Some("me"), 1), None);
        assert_eq!(held.by_another(&candidate(Some("s")), Some("me"), 5_000), None, "its lock has ended");
    }

    #[test]
    fn a_session_is_tried_again_after_a_moment_and_not_before() {
        let held = Held::default();
        held.note(&candidate(Some("s")), "other", 50_000, 0);
        held.seen_free("s", MOMENT - 1);
        assert!(held.by_another(&candidate(Some("s")), Some("me"), MOMENT).is_some());
        held.seen_free("s", MOMENT);
        assert!(held.by_another(&candidate(Some("s")), Some("me"), MOMENT).is_none());
    }
}
