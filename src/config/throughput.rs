//! The throughput of a new container.

use super::ConfigError;
use std::str::FromStr;

/// The throughput of a container that the provider creates. An existing container keeps its own.
///
/// ```
/// use duroxide_cosmos::Throughput;
///
/// assert_eq!("400".parse(), Ok(Throughput::Manual(400)));
/// assert_eq!("autoscale:4000".parse(), Ok(Throughput::Autoscale(4000)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Throughput {
    /// No throughput of its own: for serverless accounts, and for databases that share their throughput among
    /// containers.
    #[default]
    ServerlessOrShared,
    /// A constant number of RU/s: at least 400, in steps of 100.
    Manual(u64),
    /// The maximum of RU/s that the service scales to. The minimum is a tenth of it. At least 1,000, in steps of 1,000.
    Autoscale(u64),
}

impl Throughput {
    const SETTING: &'static str = "the throughput (COSMOS_THROUGHPUT)";

    /// Checks the limits of the service.
    pub(super) fn validate(self) -> Result<(), ConfigError> {
        let (rate, least, step) = match self {
            Self::ServerlessOrShared => return Ok(()),
            Self::Manual(rate) => (rate, 400, 100),
            Self::Autoscale(rate) => (rate, 1_000, 1_000),
        };
        if rate >= least && rate % step == 0 {
            return Ok(());
        }
        Err(ConfigError::invalid(
            Self::SETTING,
            format!("of {rate} RU/s is not possible: at least {least}, in steps of {step}"),
        ))
    }
}

impl FromStr for Throughput {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = match text.split_once(':') {
            None => text.trim().parse().map(Self::Manual).ok(),
            Some((mode, rate)) if mode.trim().eq_ignore_ascii_case("autoscale") => {
                rate.trim().parse().map(Self::Autoscale).ok()
            }
            Some(_) => None,
        };
        parsed.ok_or_else(|| ConfigError::invalid(Self::SETTING, "must be a number of RU/s, or autoscale:NUMBER"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_follows_the_steps_of_the_service() {
        assert_eq!(Throughput::Manual(400).validate(), Ok(()));
        assert_eq!(Throughput::Autoscale(1_000).validate(), Ok(()));
        for bad in
            [Throughput::Manual(450), Throughput::Manual(300), Throughput::Autoscale(0), Throughput::Autoscale(1_500)]
        {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
        assert_eq!(" Autoscale : 4000 ".parse(), Ok(Throughput::Autoscale(4_000)));
        for bad in ["", "many", "-1", "autoscale", "autoscale:", "manual:400", "400:autoscale"] {
            assert!(bad.parse::<Throughput>().is_err(), "{bad}");
        }
    }
}
