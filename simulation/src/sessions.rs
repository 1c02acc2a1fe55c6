//! Sessions as the wire sees them: a renewal renews all that its owner uses.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

use crate::ledger::Broken;
use crate::seams;

/// A session's document, as the wire has last seen it written.
#[derive(Clone, Debug)]
struct Session {
    owner: String,
    last_activity: u64,
    until: u64,
}

#[derive(Debug, Default)]
struct State {
    sessions: BTreeMap<String, Session>,
    /// Until when each owner has had each session at most.
    longest: BTreeMap<(String, String), u64>,
    /// Until when a client met trouble, and in which logical partition. Without one, all that the client does may have met it.
    troubles: BTreeMap<String, Vec<(Duration, Option<String>)>>,
}

/// What is known of sessions.
#[derive(Debug, Default)]
pub struct Sessions(Mutex<State>);

/// A call that renews sessions: what it must have renewed when it returns.
#[derive(Debug)]
pub struct Renewal {
    client: String,
    began: Duration,
    until: u64,
    /// Owner and session.
    used: Vec<(String, String)>,
}

/// A session that is used for less than that from now on need not be renewed: the call may come too late.
const JUST_IN_TIME: u64 = 1_000;

impl Sessions {
    /// A session's document was written.
    pub fn written(&self, document: &Value) {
        let text = |property: &str| document[property].as_str().unwrap_or("").to_owned();
        let number = |property: &str| document[property].as_u64().unwrap_or(0);
        let (id, owner, until) = (text("sessionId"), text("owner"), number("lockedUntil"));
        self.with(|state| {
            let longest = state.longest.entry((owner.clone(), id.clone())).or_default();
            *longest = until.max(*longest);
            state.sessions.insert(id, Session { owner, last_activity: number("lastActivity"), until });
        });
    }

    /// The document of the session in this logical partition was deleted.
    pub fn deleted(&self, partition: &str) {
        self.with(|state| state.sessions.remove(session_of(partition)));
    }

    /// A client's request met trouble, in this logical partition; or the client itself did. What began within `lasts` met it, too.
    pub fn met_trouble(&self, client: &str, partition: Option<String>, lasts: Duration) {
        let until = seams::now() + lasts;
        self.with(|state| state.troubles.entry(client.to_owned()).or_default().push((until, partition)));
    }

    /// A client is about to renew the sessions of these owners.
    pub fn renewal(&self, client: &str, owners: &[&str], extend_for: Duration, idle: Duration) -> Renewal {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let now = seams::host_millis();
        let is_used = |session: &Session| {
            let late = now + JUST_IN_TIME;
            let in_use = session.last_activity.saturating_add(millis(idle)) > late;
            owners.contains(&session.owner.as_str()) && in_use && session.until > late
        };
        let used = self.with(|state| {
            let used = state.sessions.iter().filter(|(_, session)| is_used(session));
            used.map(|(id, session)| (session.owner.clone(), id.clone())).collect()
        });
        Renewal { client: client.to_owned(), began: seams::now(), until: now + millis(extend_for), used }
    }

    /// What a call has not renewed that nothing has kept it from.
    pub fn not_renewed(&self, renewal: &Renewal) -> Option<Broken> {
        self.with(|state| {
            let troubles = state.troubles.get(&renewal.client).into_iter().flatten();
            let met: Vec<Option<&str>> = troubles
                .filter(|(until, _)| *until >= renewal.began)
                .map(|(_, partition)| partition.as_deref())
                .collect();
            if met.contains(&None) {
                return None;
            }
            let kept_from = |session: &String| met.iter().flatten().any(|partition| session_of(partition) == session);
            let is_left = |(owner, session): &&(String, String)| {
                let until = state.longest.get(&(owner.clone(), session.clone())).copied().unwrap_or(0);
                state.sessions.contains_key(session) && until < renewal.until && !kept_from(session)
            };
            let left: Vec<&(String, String)> = renewal.used.iter().filter(is_left).collect();
            let (owner, session) = left.first()?;
            Some(Broken {
                invariant: "every session that is used is renewed",
                instance: session.clone(),
                detail: format!(
                    "{owner} has not renewed {} of the {} sessions that it uses, though their requests met no trouble",
                    left.len(),
                    renewal.used.len()
                ),
            })
        })
    }

    fn with<R>(&self, use_it: impl FnOnce(&mut State) -> R) -> R {
        use_it(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The name of the session that has this logical partition.
fn session_of(partition: &str) -> &str {
    partition.strip_prefix("$s:").unwrap_or(partition)
}

/// The logical partition of a session.
pub fn partition_of(session: &str) -> String {
    format!("$s:{session}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const LOCK: Duration = Duration::from_secs(5);

    fn session(id: &str, since: u64) -> Value {
        let until = seams::host_millis() + since + 3_000;
        json!({"sessionId": id, "owner": "w0", "lastActivity": seams::host_millis(), "lockedUntil": until})
    }

    #[test]
    fn a_session_in_use_is_renewed_unless_something_keeps_its_owner_from_it() {
        let sessions = Sessions::default();
        ["a", "b", "c"].iter().for_each(|id| sessions.written(&session(id, 0)));
        let renewal = sessions.renewal("w0#1", &["w0"], LOCK, LOCK);
        sessions.written(&session("a", 10_000));
        let left = |sessions: &Sessions| sessions.not_renewed(&renewal).map(|broken| broken.instance);
        assert_eq!(left(&sessions).as_deref(), Some("b"));
        sessions.met_trouble("w0#1", Some(partition_of("b")), Duration::ZERO);
        assert_eq!(left(&sessions).as_deref(), Some("c"));
        sessions.deleted("$s:c");
        assert_eq!(left(&sessions), None);
        sessions.written(&session("c", 0));
        sessions.met_trouble("w0#1", None, Duration::ZERO);
        assert_eq!(left(&sessions), None);
    }
}
