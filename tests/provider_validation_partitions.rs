//! duroxide's validation suite in process, on containers of several physical partitions: queries visit each of them, and
//! an instance's neighbours are elsewhere. And once with nothing handed over.

mod validation;

mod four_partitions {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::InProcess(4));
}

mod nothing_handed_over {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::Plain(1));
}

mod sixteen_partitions {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::InProcess(16));
}
