//! Filters that select instances.

use crate::times::{before, parse_length};
use clap::{builder::NonEmptyStringValueParser, Args, ValueEnum};
use duroxide_cosmos::operate::InstanceQuery;
use std::time::Duration;

/// The status of an instance, as users type it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StatusFilter {
    Running,
    Completed,
    Failed,
    /// The execution has ended, and the next one is about to begin
    Continued,
}

impl StatusFilter {
    /// The status as the container stores it.
    pub fn as_stored(self) -> &'static str {
        match self {
            Self::Running => "Running",
            Self::Completed => "Completed",
            Self::Failed => "Failed",
            Self::Continued => "ContinuedAsNew",
        }
    }
}

/// The filters of `list` and of `prune --all`.
#[derive(Args)]
pub struct Filter {
    /// Only instances with this status
    #[arg(long, value_enum, ignore_case = true)]
    pub status: Option<StatusFilter>,
    /// Only instances of this orchestration
    #[arg(long, value_name = "ORCHESTRATION", value_parser = NonEmptyStringValueParser::new())]
    pub name: Option<String>,
    /// Only the children of this instance
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    pub parent: Option<String>,
    /// Only ids that contain this text
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub text: Option<String>,
    /// Only instances created at most this long ago, such as 15m, 2h or 7d
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    pub newer_than: Option<Duration>,
    /// Only instances created at least this long ago
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    pub older_than: Option<Duration>,
}

impl Filter {
    /// Whether the user gave no filter.
    pub fn is_empty(&self) -> bool {
        self.status.is_none()
            && self.name.is_none()
            && self.parent.is_none()
            && self.text.is_none()
            && self.newer_than.is_none()
            && self.older_than.is_none()
    }

    pub fn query(&self) -> InstanceQuery {
        let mut query = InstanceQuery::default();
        query.status = self.status.map(|status| status.as_stored().to_owned());
        (query.name, query.parent, query.text) = (self.name.clone(), self.parent.clone(), self.text.clone());
        query.created_after = self.newer_than.map(before);
        query.created_before = self.older_than.map(before);
        query
    }
}
