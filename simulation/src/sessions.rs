//! Sessions as the wire shows them. A renewal must renew all sessions that its owner uses.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

use crate::oracle::Violation;
use crate::virtual_time;

/// A session document, as the wire has last shown it.
#[derive(Clone, Debug)]
struct ObservedSession {
    owner: String,
    last_activity: u64,
    until: u64,
}

#[derive(Debug, Default)]
struct SessionState {
    sessions: BTreeMap<String, ObservedSession>,
    /// The latest end of the lock that each owner has had on each session.
    longest: BTreeMap<(String, String), u64>,
    /// The faults that each client met: the end of the fault and the logical partition. A fault without a partition may
    /// have met every request of the client.
    faults: BTreeMap<String, Vec<(Duration, Option<String>)>>,
}

/// The sessions that the wire has shown.
#[derive(Debug, Default)]
pub struct Sessions(Mutex<SessionState>);

/// A call that renews sessions, with the sessions that it must have renewed when it returns.
#[derive(Debug)]
pub struct Renewal {
    client: String,
    began: Duration,
    until: u64,
    /// The sessions in use: owner and session.
    used: Vec<(String, String)>,
}

/// A session whose use or lock ends within this many milliseconds need not be renewed. The call may be too late for it.
const TOO_LATE: u64 = 1_000;

impl Sessions {
    /// A session document was written.
    pub fn written(&self, document: &Value) {
        let text = |property: &str| document[property].as_str().unwrap_or("").to_owned();
        let number = |property: &str| document[property].as_u64().unwrap_or(0);
        let (id, owner, until) = (text("sessionId"), text("owner"), number("lockedUntil"));
        self.with(|state| {
            let longest = state.longest.entry((owner.clone(), id.clone())).or_default();
            *longest = until.max(*longest);
            state.sessions.insert(id, ObservedSession { owner, last_activity: number("lastActivity"), until });
        });
    }

    /// The session document in this logical partition was deleted.
    pub fn deleted(&self, partition: &str) {
        self.with(|state| state.sessions.remove(session_of(partition)));
    }

    /// A request of a client met a fault, in this logical partition if there is one, or the client itself was stopped.
    /// Requests that begin within `lasts` meet the fault as well.
    pub fn fault_met(&self, client: &str, partition: Option<String>, lasts: Duration) {
        let until = virtual_time::now() + lasts;
        self.with(|state| state.faults.entry(client.to_owned()).or_default().push((until, partition)));
    }

    /// A client is about to renew the sessions of these owners.
    pub fn renewal(&self, client: &str, owners: &[&str], extend_for: Duration, idle: Duration) -> Renewal {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let now = virtual_time::host_millis();
        let is_used = |session: &ObservedSession| {
            let late = now + TOO_LATE;
            let in_use = session.last_activity.saturating_add(millis(idle)) > late;
            owners.contains(&session.owner.as_str()) && in_use && session.until > late
        };
        let used = self.with(|state| {
            let used = state.sessions.iter().filter(|(_, session)| is_used(session));
            used.map(|(id, session)| (session.owner.clone(), id.clone())).collect()
        });
        Renewal { client: client.to_owned(), began: virtual_time::now(), until: now + millis(extend_for), used }
    }

    /// The violation if a call has not renewed a session whose requests met no fault.
    pub fn not_renewed(&self, renewal: &Renewal) -> Option<Violation> {
        self.with(|state| {
            let faults = state.faults.get(&renewal.client).into_iter().flatten();
            let met: Vec<Option<&str>> = faults
                .filter(|(until, _)| *until >= renewal.began)
                .map(|(_, partition)| partition.as_deref())
                .collect();
            if met.contains(&None) {
                return None;
            }
            let met_fault = |session: &String| met.iter().flatten().any(|partition| session_of(partition) == session);
            let is_missing = |(owner, session): &&(String, String)| {
                let until = state.longest.get(&(owner.clone(), session.clone())).copied().unwrap_or(0);
                state.sessions.contains_key(session) && until < renewal.until && !met_fault(session)
            };
            let missing: Vec<&(String, String)> = renewal.used.iter().filter(is_missing).collect();
            let (owner, session) = missing.first()?;
            Some(Violation {
                invariant: "every session in use is renewed",
                instance: session.clone(),
                detail: format!(
                    "{owner} has not renewed {} of the {} sessions that it uses, although their requests met no fault",
                    missing.len(),
                    renewal.used.len()
                ),
            })
        })
    }

    fn with<R>(&self, use_state: impl FnOnce(&mut SessionState) -> R) -> R {
        use_state(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The session of this logical partition.
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
        let until = virtual_time::host_millis() + since + 3_000;
        json!({"sessionId": id, "owner": "w0", "lastActivity": virtual_time::host_millis(), "lockedUntil": until})
    }

    #[test]
    fn a_session_in_use_is_renewed_unless_its_owner_meets_a_fault() {
        let sessions = Sessions::default();
        ["a", "b", "c"].iter().for_each(|id| sessions.written(&session(id, 0)));
        let renewal = sessions.renewal("w0#1", &["w0"], LOCK, LOCK);
        sessions.written(&session("a", 10_000));
        let left = |sessions: &Sessions| sessions.not_renewed(&renewal).map(|violation| violation.instance);
        assert_eq!(left(&sessions).as_deref(), Some("b"));
        sessions.fault_met("w0#1", Some(partition_of("b")), Duration::ZERO);
        assert_eq!(left(&sessions).as_deref(), Some("c"));
        sessions.deleted("$s:c");
        assert_eq!(left(&sessions), None);
        sessions.written(&session("c", 0));
        sessions.fault_met("w0#1", None, Duration::ZERO);
        assert_eq!(left(&sessions), None);
    }
}
