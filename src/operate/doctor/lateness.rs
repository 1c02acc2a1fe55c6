//! Overdue work that no worker takes, and the reason.

use super::{findings::LATE, snapshot::Snapshot, Member};
use crate::model::{ActivityDocument, InstanceDocument, Millis, Versions};
use std::collections::BTreeMap;

/// Overdue work of an instance.
pub(super) struct LateWork {
    pub(super) subject: String,
    pub(super) detail: String,
    pub(super) todo: String,
}

/// The overdue work of an instance.
pub(super) fn of(snapshot: &Snapshot, document: Option<&InstanceDocument>, members: &[Member]) -> Vec<LateWork> {
    let alive: Vec<&Member> = members.iter().filter(|member| member.alive).collect();
    turns(snapshot, document, &alive).into_iter().chain(activities(snapshot, &alive)).collect()
}

fn turns(snapshot: &Snapshot, document: Option<&InstanceDocument>, members: &[&Member]) -> Option<LateWork> {
    let is_locked = document.is_some_and(|document| document.locked_until(snapshot.now).is_some());
    let is_busy =
        document.is_some_and(|document| document.removal.deleting.is_some() || document.commit.roll_forward.is_some());
    // Claimed messages are due when the lock has ended.
    let lock = document.and_then(|document| document.claim.lock.as_ref()).map_or(0, |lock| lock.until);
    let due = snapshot.messages.iter().map(|(message, _)| message.due.max(lock)).min()?;
    if is_locked || is_busy || due + LATE >= snapshot.now {
        return None;
    }
    let waiting = snapshot.messages.iter().filter(|(message, _)| message.due <= snapshot.now).count();
    let pinned = document.and_then(|document| document.current.pinned.clone());
    let attempts = document.map_or(0, |document| document.claims_since(0));
    let (why, todo) = why_no_turn(pinned.as_deref(), attempts, members);
    let since = seconds(due, snapshot.now);
    let lock = if lock > 0 { ", with a lock that has expired" } else { "" };
    Some(LateWork {
        subject: "turn".to_owned(),
        detail: format!("{waiting} messages have waited for {since}{lock}: {why}"),
        todo,
    })
}

fn why_no_turn(pinned: Option<&str>, attempts: u32, members: &[&Member]) -> (String, String) {
    let takers: Vec<&Member> = members.iter().copied().filter(|member| member.turns.is_some()).collect();
    if takers.is_empty() {
        let todo = "start a worker, or another one if the present workers are busy";
        return (no_free_process("takes turns", "turn", members.len()), todo.to_owned());
    }
    let version = pinned.and_then(|pinned| semver::Version::parse(pinned).ok());
    let runs = |member: &&Member| {
        let versions = member.turns.as_ref().and_then(|turns| turns.versions.clone());
        Versions(versions).run(version.as_ref())
    };
    if !takers.iter().any(runs) {
        let pinned = pinned.unwrap_or_default();
        let why = format!("it is pinned to duroxide {pinned}, which none of {} processes runs", takers.len());
        return (why, format!("start a worker with duroxide {pinned}"));
    }
    let why = format!(
        "{} processes could take it, after {attempts} attempts",
        takers.iter().filter(|member| runs(member)).count()
    );
    (why, "read the logs of the workers; a turn that fails is tried again after increasing delays".to_owned())
}

/// The reason why work waits that no process fetches. A process fetches only while one of its workers is free. `silent`
/// processes have not fetched such work in the last minute and may be busy.
fn no_free_process(does: &str, what: &str, silent: usize) -> String {
    match silent {
        0 => format!("no process {does}"),
        _ => {
            let busy = "they are busy or take none";
            format!("no free process {does}; {silent} processes have fetched no {what} in the last minute: {busy}")
        }
    }
}

fn activities(snapshot: &Snapshot, members: &[&Member]) -> Vec<LateWork> {
    // One report for all activities with the same tag and session.
    let mut groups: BTreeMap<(Option<&str>, Option<&str>), Vec<&ActivityDocument>> = BTreeMap::new();
    for (activity, _) in snapshot.activities.values().filter(|(activity, _)| activity.due + LATE < snapshot.now) {
        groups.entry((activity.tag.as_deref(), activity.session_id.as_deref())).or_default().push(activity);
    }
    groups
        .into_iter()
        .map(|((tag, session), activity)| {
            let due = activity.iter().map(|activity| activity.due).min().unwrap_or_default();
            let attempts = activity.iter().map(|activity| activity.attempts).max().unwrap_or_default();
            let (why, todo) = why_no_activity(snapshot, tag, session, attempts, members);
            let (count, since) = (activity.len(), seconds(due, snapshot.now));
            let named = tag.map_or_else(String::new, |tag| format!(" with tag {tag:?}"));
            let bound = session.map_or_else(String::new, |session| format!(" of session {session:?}"));
            LateWork {
                subject: format!("activities {tag:?} {session:?}"),
                detail: format!("{count} activities{named}{bound} have waited for {since}: {why}"),
                todo,
            }
        })
        .collect()
}

fn why_no_activity(
    snapshot: &Snapshot,
    tag: Option<&str>,
    session: Option<&str>,
    attempts: u32,
    members: &[&Member],
) -> (String, String) {
    let takes = |member: &&&Member| {
        let capabilities = member.activities.as_ref();
        capabilities.is_some_and(|capabilities| match tag {
            _ if capabilities.any => true,
            None => capabilities.untagged,
            Some(tag) => capabilities.tags.iter().any(|of| of == tag),
        })
    };
    let takers = members.iter().filter(takes).count();
    if takers == 0 {
        let (what, with) = match tag {
            Some(tag) => (format!(" with tag {tag:?}"), format!(" that takes tag {tag:?}")),
            None => (" without a tag".to_owned(), String::new()),
        };
        let silent = members.iter().filter(|member| member.activities.is_none()).count();
        let why = no_free_process(&format!("runs activities{what}"), "activity", silent);
        return (why, format!("start a worker{with}, or another one if the present workers are busy"));
    }
    let held =
        session.and_then(|session| snapshot.sessions.get(session)).filter(|held| held.locked_until > snapshot.now);
    if let Some(held) = held {
        let owner = &held.owner;
        let is_known = members.iter().any(|member| member.session_owners.contains(owner));
        let left = seconds(snapshot.now, held.locked_until);
        if !is_known {
            let why = format!("its session belongs to {owner:?} for {left}, and no live process has that name");
            return (why, "wait until the session's lock has expired; then any worker takes it".to_owned());
        }
        let why = format!("its session belongs to {owner:?} for {left}, and that process is busy or does not take it");
        return (why, "check that worker; when it stops, another worker takes the session".to_owned());
    }
    let why = format!("{takers} processes could take it, after {attempts} attempts");
    (why, "read the logs of the workers: they may be busy with other activities, or fail to start it".to_owned())
}

pub(super) fn seconds(from: Millis, to: Millis) -> String {
    format!("{} s", to.saturating_sub(from) / 1_000)
}
