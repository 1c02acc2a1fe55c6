//! Times, ages and durations in a readable form.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The time of this machine, in milliseconds since 1970.
pub fn now() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

/// The time that lies this far in the past.
pub fn before(age: Duration) -> u64 {
    now().saturating_sub(u64::try_from(age.as_millis()).unwrap_or(u64::MAX))
}

/// A time in UTC with milliseconds.
pub fn moment(millis: u64) -> String {
    let time = i64::try_from(millis).ok().and_then(|millis| jiff::Timestamp::from_millisecond(millis).ok());
    time.map_or_else(|| "?".to_owned(), |time| time.strftime("%Y-%m-%d %H:%M:%S%.3fZ").to_string())
}

/// The age of a time.
pub fn ago(millis: u64) -> String {
    format!("{} ago", length(now().saturating_sub(millis)))
}

/// A duration in its two largest units.
pub fn length(millis: u64) -> String {
    let (seconds, rest) = (millis / 1_000, millis % 1_000);
    match seconds {
        0 => format!("{rest} ms"),
        1..60 => format!("{seconds}.{} s", rest / 100),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// Parses a duration with one unit: `90s`, `15m`, `2h`, `7d`.
pub fn parse_length(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration: write 90s, 15m, 2h or 7d");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| invalid())?;
    let unit = match &text[digits.len()..] {
        "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err(invalid()),
    };
    number.checked_mul(unit).map(Duration::from_secs).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_printed_in_two_units() {
        let printed: Vec<String> = [7, 1_234, 61_000, 7_260_000, 90_000_000].map(length).into();
        assert_eq!(printed, ["7 ms", "1.2 s", "1 min 1 s", "2 h 1 min", "1 d 1 h"]);
    }

    #[test]
    fn a_duration_needs_a_number_and_one_unit() {
        assert_eq!(parse_length("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_length("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for invalid in ["", "7", "d", "-1h", "1w", "99999999999999999999d", "184467440737095516d", "7é"] {
            assert!(parse_length(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn times_are_printed_in_utc() {
        assert_eq!(moment(1_763_256_000_123), "2025-11-16 01:20:00.123Z");
        assert_eq!(moment(u64::MAX), "?");
    }
}
