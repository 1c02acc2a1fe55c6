//! A failure can always be recorded: what it embeds is cut to a size that fits, and its parent always hears.
//!
//! duroxide's runtime puts the messages of a turn into the event that poisons it, and an error's own text may have any size. If
//! such an event could not be stored, the turn would be refused, run again and fail again, for ever.

use super::plan::Ack;
use duroxide::{providers::WorkItem, ErrorDetails, EventKind, PoisonMessageType};

/// Bytes of one text of a failure. A text is JSON within JSON within JSON when it is stored, which makes some characters eight
/// times as long: this many fit a document all the same, in an event as in a message.
const MAX_TEXT: usize = 96 * 1024;

/// Cuts what the failures of a turn embed.
pub(crate) fn shorten(ack: &mut Ack) {
    for event in &mut ack.events {
        if let EventKind::OrchestrationFailed { details } = &mut event.kind {
            shorten_details(details);
        }
    }
    for item in &mut ack.orchestrator_items {
        shorten_item(item);
    }
    let failed = ack.metadata.status.as_deref() == Some(crate::model::status::FAILED);
    if let Some(output) = ack.metadata.output.as_mut().filter(|_| failed) {
        cut(output);
    }
}

/// Cuts what a message about a failure embeds.
pub(crate) fn shorten_item(item: &mut WorkItem) {
    if let WorkItem::SubOrchFailed { details, .. } | WorkItem::ActivityFailed { details, .. } = item {
        shorten_details(details);
    }
}

fn shorten_details(details: &mut ErrorDetails) {
    match details {
        ErrorDetails::Infrastructure { operation, message, .. } => {
            cut(operation);
            cut(message);
        }
        ErrorDetails::Configuration { resource, message, .. } => {
            cut(resource);
            if let Some(message) = message {
                cut(message);
            }
        }
        ErrorDetails::Application { message, .. } => cut(message),
        ErrorDetails::Poison { message, message_type, .. } => {
            cut(message);
            if let PoisonMessageType::FailedDeserialization { error, .. } = message_type {
                cut(error);
            }
        }
    }
}

/// Keeps the beginning of a text that is too long, and says how much there was.
fn cut(text: &mut String) {
    if text.len() <= MAX_TEXT {
        return;
    }
    let all = text.len();
    let mut end = MAX_TEXT;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text.push_str(&format!(" ... (cut: {all} bytes in all)"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters_and_says_so_and_a_short_one_is_not() {
        let mut long = "é".repeat(MAX_TEXT);
        cut(&mut long);
        assert!(long.len() < MAX_TEXT + 64 && long.ends_with(&format!("(cut: {} bytes in all)", 2 * MAX_TEXT)));
        let mut short = "x".repeat(MAX_TEXT);
        cut(&mut short);
        assert_eq!(short.len(), MAX_TEXT);
    }
}
